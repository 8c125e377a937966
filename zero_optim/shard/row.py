"""The flat tensor of a unit's bucket, and this rank's row. No communication."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_optim.plan.layout import Layout
from zero_optim.plan.pieces import is_whole, piece_of
from zero_optim.shard.keeping import RowKeeping
from zero_optim.shard.pages import FreePages
from zero_optim.shard.places import Form, views_in, zero_padding


class UnitFlat:
    """A flat tensor that keeps one storage while its memory comes and goes.

    ``views`` are the parameters in it, ``own`` is this rank's row. `UnitRow` sets ``stays`` if it is never
    freed.
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
        self.forms, self.layout, self.rank = forms, layout, rank
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
        """Bytes while it has memory."""
        return self.layout.numel * self.tensor.element_size()

    @property
    def nbytes_live(self) -> int:
        """Its current bytes beside the row."""
        return self.nbytes if self._memory.is_there and not self.stays else 0

    def stay(self) -> None:
        """Allocate memory for good; padding is zeroed."""
        self._memory.grow(stays=True)
        zero_padding(self.tensor, self.layout)

    def grow(self) -> None:
        """Allocate uninitialized memory."""
        if not self.stays:
            self._memory.grow()

    def empty(self) -> None:
        """Release the memory and its values."""
        if not self.stays:
            self._memory.free()

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of it that dies with its memory."""
        if self.stays or tensor.layout is not torch.strided:
            return False
        address = self.tensor.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address


class Place(NamedTuple):
    """This rank's part of one parameter."""

    param: int  # index in the bucket
    first: int  # of its rows that are here
    rows: Tensor  # a view of what is kept


class UnitRow:
    """One rank's row of a unit's bucket, ``values`` (1-D), allocated at first use.

    A row that is the whole bucket, in memory and in the compute dtype, is the flat tensor itself, never
    emptied.
    """

    def __init__(self, flat: UnitFlat, dtype: torch.dtype, keeping: RowKeeping | None) -> None:
        self._flat = flat
        self._keeping = keeping  # None for memory beside the flat tensor
        is_all = (flat.span.start, flat.span.stop) == (0, flat.layout.end_of_rows) and keeping is None
        flat.stays = is_all and flat.tensor.dtype == dtype
        self.values = flat.own if flat.stays else flat.tensor.new_empty(0, dtype=dtype)
        self._is_made = False

    @property
    def numel(self) -> int:
        """Number of elements with padding, also before allocation."""
        return self._flat.own.numel()

    @property
    def is_rounded(self) -> bool:
        """Whether the flat tensor has another dtype."""
        return self._flat.tensor.dtype != self.values.dtype

    def make(self) -> None:
        """Allocate the row if needed; padding is zeroed."""
        if self._is_made:
            return
        self._is_made = True
        if self._flat.stays:
            self._flat.stay()
            return
        row = self.values.new_empty(self.numel)
        if self._keeping is None:
            zero_padding(row, self._flat.layout, self._flat.span.start)
            self.values = row
        else:
            self.values = self._keeping.new_row(row.zero_())

    def places(self) -> Iterator[Place]:
        """List this rank's parts of parameters, as views."""
        if self._keeping is not None:
            self._keeping.wait()
        flat, sizes = self._flat, [form.size for form in self._flat.forms]
        pieces, offsets = flat.layout.pieces(sizes), flat.layout.offsets()
        for param, (form, offset) in enumerate(zip(flat.forms, offsets, strict=True)):
            piece = piece_of(pieces[param], flat.rank)
            if piece is not None:
                size, first, at = form.size, piece.start, offset - flat.span.start
                if not is_whole(piece, size):  # dimension 0 is outermost in memory
                    size, at = torch.Size((piece.stop - first, *size[1:])), at + first * form.stride[0]
                yield Place(param, first, self.values.as_strided(size, form.stride, at))

    @torch.no_grad()
    def take_in(self, whole: Sequence[Tensor | None]) -> None:
        """Copy this rank's part out of whole parameters; skips None."""
        self.make()
        for index, first, place in self.places():
            values = whole[index]
            if values is not None:
                cut = place.shape != values.shape
                place.copy_(values[first : first + len(place)] if cut else values)
                if self._keeping is not None:
                    self._keeping.keep([place])

    def read(self, target: Tensor) -> None:
        """Copy the row to a 1-D tensor of its length and any dtype."""
        if self._keeping is None:
            target.copy_(self.values)
        else:
            self._keeping.read(self.values, target)

    def write(self, values: Tensor) -> None:
        """Copy a tensor of its length to the row."""
        if self._keeping is None:
            self.values.copy_(values)
        else:
            self._keeping.write(self.values, values)

    def take_written(self) -> None:
        """Copy written elements of the flat tensor to the row, except those equal to the rounded row."""
        written = self._flat.own
        if self.is_rounded:
            written = written if self._keeping is None else self._keeping.brought(written)
            is_same = self.values.to(written.dtype) == written
            self.write(torch.where(is_same, self.values, written.to(self.values.dtype)))
        elif not self._flat.stays:
            self.write(written)
