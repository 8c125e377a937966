"""The flat tensor of a unit's bucket, which is empty but while its parameters are whole.

See Note [Freed by emptying the storage] in `zero_optim.shard.units`. Nothing here communicates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.plan.layout import Layout
from zero_optim.shard.padding import zero_padding
from zero_optim.shard.places import Form, views_in


class UnitFlat:
    """A flat tensor with one storage for ever, which is emptied and grown again. It begins empty.

    Args:
        forms: of the parameters.
        layout: where each lies.
        rank: this group rank.
        dtype: of the flat tensor.
        device: likewise.

    Attributes:
        forms: as given.
        layout: as given.
        tensor: the flat tensor, 1-D.
        views: the parameters in it.
        span: where the row of this rank is.
        own: this row, a view.
        stays: it is not emptied any more, as it is what this rank keeps for good. Set by whoever owns it.
    """

    def __init__(
        self, forms: Sequence[Form], layout: Layout, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.forms = forms
        self.layout = layout
        # Views can only be made of a storage that is large enough. Nobody writes to it.
        self.tensor = torch.empty(layout.numel, dtype=dtype, device=device)
        self.views = self.views_of(self.tensor)
        rows = [slice(row.start, row.stop) for row in layout.rows if row.owner == rank]
        self.span = rows[0] if rows else slice(0, 0)
        self.own = self.tensor[self.span]
        self.tensor.untyped_storage().resize_(0)
        self.stays = False

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return views_in(flat, self.forms, self.layout)

    @property
    def nbytes(self) -> int:
        """The size while it is not empty."""
        return self.layout.numel * self.tensor.element_size()

    @property
    def nbytes_live(self) -> int:
        """Its bytes right now, beside what this rank keeps: all, or none."""
        return 0 if self.stays else self.tensor.untyped_storage().nbytes()

    def stay(self) -> None:
        """Get memory for good, with zeros in the padding; the rest has any values."""
        self.tensor.untyped_storage().resize_(self.nbytes)
        zero_padding(self.tensor, self.layout)

    def grow(self) -> None:
        """Get memory, with any values in it."""
        if not self.stays:
            self.tensor.untyped_storage().resize_(self.nbytes)

    def empty(self) -> None:
        """Give up the memory."""
        if not self.stays:
            self.tensor.untyped_storage().resize_(0)

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of it that dies when it is emptied."""
        if self.stays or tensor.layout is not torch.strided:
            return False
        address = self.tensor.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address

    @property
    def storage_id(self) -> int:
        """What tells its storage from others, also while it is empty."""
        return int(self.tensor.untyped_storage()._cdata)
