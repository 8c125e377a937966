"""The row of a bucket that this rank owns, in memory that stays. No communication."""

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_optim.plan.pieces import is_whole
from zero_optim.plan.strides import kept_dtype
from zero_optim.shard.bucket import Members
from zero_optim.shard.places import zero_padding
from zero_optim.shard.rows.row_storage import RowStorage
from zero_optim.shard.rows.unit_memory import UnitMemory


class OwnRow:
    """The row of a bucket, in the dtype that its owner keeps; it gets memory at its first use.

    ``values``: the row. ``span``: where it lies in the flat tensor. ``is_flat``: it is that tensor's memory.
    """

    def __init__(self, members: Members, memory: UnitMemory, storage: RowStorage) -> None:
        flat, layout, dtype = memory.flat, members.layout, kept_dtype(members.params[0])
        spans = [slice(row.start, row.stop) for row in layout.rows if row.owner == members.rank]
        self.span = spans[0] if spans else slice(0, 0)
        self._place = flat[self.span]
        # A row that is all of it, in ordinary memory and in its dtype, is the flat tensor, which stays then.
        is_all = (self.span.start, self.span.stop) == (0, layout.numel)
        self.is_flat = is_all and not storage.on_host and flat.dtype == dtype
        self.values = self._place if self.is_flat else flat.new_empty(0, dtype=dtype)
        self.is_rounded = flat.dtype != dtype  # in the flat tensor
        self._memory, self._storage, self._layout = memory, storage, layout
        self._is_made = False
        self._parts = []
        offsets = layout.offsets()
        for index, piece in members.own:
            (_, _, size, stride), at = members.forms[index], offsets[index] - self.span.start
            if not is_whole(piece, size):  # dimension 0 is outermost in memory
                size, at = torch.Size((piece.stop - piece.start, *size[1:])), at + piece.start * stride[0]
            self._parts.append((members.params[index], piece.start, size, stride, at))

    def _make(self) -> None:
        if self._is_made:
            return
        self._is_made = True
        if self.is_flat:
            self._memory.grow()
            zero_padding(self.values, self._layout)
            return
        numel = self.span.stop - self.span.start
        if self._storage.on_host:
            self.values = self._storage.new_row(self.values.new_zeros(numel))
        else:
            self.values = self.values.new_empty(numel)
            zero_padding(self.values, self._layout, self.span.start)

    @property
    def sent(self) -> Tensor | None:
        """The row as the flat tensor would have it, where it lies elsewhere; else None."""
        return None if self.is_flat or self.is_rounded or self._storage.on_host else self.values

    def places(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Yield parameters, the first row of each that is here, and the rows, as views."""
        self._make()
        self._storage.wait()
        for param, first, size, stride, at in self._parts:
            yield param, first, self.values.as_strided(size, stride, at)

    def by_param(self) -> dict[Tensor, Tensor]:
        """Map the parameters of which this rank owns rows to views of these."""
        return {param: rows for param, _, rows in self.places()}

    @torch.no_grad()
    def take_in(self, param: Tensor, whole: Tensor) -> None:
        """Copy the rows of a parameter out of all its values."""
        for member, first, rows in self.places():
            if member is param:
                rows.copy_(whole[first : first + len(rows)] if rows.shape != whole.shape else whole)

    def read(self, target: Tensor) -> None:
        """Start to copy it to a tensor of its length and any dtype."""
        self._storage.read(self.values, target)

    @torch.no_grad()
    def fill(self) -> None:
        """Start to copy it to its place in the flat tensor."""
        self._storage.read(self.values, self._place)

    def write(self, values: Tensor) -> None:
        """Copy a tensor of its length to it."""
        self._storage.write(self.values, values)

    def take_written(self) -> None:
        """Copy what the flat tensor has there, without what differs by rounding alone."""
        written = self._place
        if self.is_rounded:
            written = self._storage.brought(written)
            is_same = self.values.to(written.dtype) == written
            self.write(torch.where(is_same, self.values, written.to(self.values.dtype)))
        elif not self.is_flat:
            self.write(written)
