"""The flat tensor of a unit's bucket, which has memory only while its parameters are whole.

See Note [Freed in place] in `zero_optim.shard.units`. Nothing here communicates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.plan.layout import Layout
from zero_optim.shard.padding import zero_padding
from zero_optim.shard.places import Form, views_in
from zero_optim.shard.unit_memory import FreePages


class UnitFlat:
    """A flat tensor with one storage for ever, which loses its memory and gets some again. It begins without.

    Args:
        forms: of the parameters.
        layout: where each lies.
        rank: this group rank.
        dtype: of the flat tensor.
        device: likewise.
        pages: that flat tensors of the CPU use in turn.

    Attributes:
        forms: as given.
        layout: as given.
        tensor: the flat tensor, 1-D.
        views: the parameters in it.
        span: where the row of this rank is.
        own: this row, a view.
        stays: it keeps its memory from now on: it is what this rank keeps for good. Set by whoever owns it.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        layout: Layout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: FreePages,
    ) -> None:
        """Make the tensor and its views, without memory."""
        self.forms = forms
        self.layout = layout
        self._memory = pages.memory(layout.numel, dtype, device)
        self.tensor = self._memory.flat
        self.views = self.views_of(self.tensor)
        rows = [slice(row.start, row.stop) for row in layout.rows if row.owner == rank]
        self.span = rows[0] if rows else slice(0, 0)
        self.own = self.tensor[self.span]
        self._memory.free()
        self.stays = False

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return views_in(flat, self.forms, self.layout)

    @property
    def nbytes(self) -> int:
        """The size while it has memory."""
        return self.layout.numel * self.tensor.element_size()

    @property
    def nbytes_live(self) -> int:
        """Its bytes right now, beside what this rank keeps: all, or none."""
        return self.nbytes if self._memory.is_there and not self.stays else 0

    def stay(self) -> None:
        """Get memory for good, with zeros in the padding; the rest has any values."""
        self._memory.grow(stays=True)
        zero_padding(self.tensor, self.layout)

    def grow(self) -> None:
        """Get memory, with any values in it."""
        if not self.stays:
            self._memory.grow()

    def empty(self) -> None:
        """Give up the memory, with the values."""
        if not self.stays:
            self._memory.free()

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of it that dies with its memory."""
        if self.stays or tensor.layout is not torch.strided:
            return False
        address = self.tensor.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address

    @property
    def storage_id(self) -> int:
        """What tells its storage from others, also while it has no memory."""
        return int(private.cdata(self.tensor.untyped_storage()))
