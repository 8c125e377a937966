"""Storage for a rank's rows in mapped files.

Note [A budget]
    A rank's rows, gradients, state, masters and averages lie in mapped files (`zero_optim.shard.mapped`),
    except tensors smaller than a page. They are used in portions, each written out before the next, so at
    most ``budget`` bytes are resident.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_optim.shard.mapped import PAGE, MappedMemory, in_pages

Item = TypeVar("Item")


class RowKeeping(Protocol):
    """Stores a rank's rows and gradients apart from the parameters."""

    def anew(self) -> "RowKeeping":
        """Return an empty one for another optimizer."""

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Reserve space for rows of these bytes."""

    def new_row(self, values: Tensor) -> Tensor:
        """Allocate a 1-D row with these values."""

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values to a row."""

    def read(self, row: Tensor, target: Tensor) -> None:
        """Copy a row to the parameters' device."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Store tensors again after use."""

    def brought(self, values: Tensor) -> Tensor:
        """Return values of the parameters' device where they can be compared with rows."""

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return stored copies of tensors."""

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a tensor to a stored one."""

    def wait(self) -> None:
        """Block the CPU until stored tensors can be read and written."""


class Keeping:
    """Stores tensors in mapped files: Note [A budget]."""

    def __init__(self, memory: MappedMemory, budget: int) -> None:
        self._memory = memory
        self.budget = budget

    def anew(self) -> "Keeping":
        """Return one with the same budget and folder."""
        return Keeping(self._memory.anew(), self.budget)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the files."""
        return self._memory.holds(tensor)

    def reserve(self, nbytes: int) -> None:
        """See `MappedMemory.reserve`."""
        self._memory.reserve(nbytes)

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """See `RowKeeping`; OSError if the disk has less."""
        self._memory.reserve(sum(in_pages(max(1, each)) for each in nbytes))

    def _is_kept(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        return is_plain and tensor.numel() * tensor.element_size() >= PAGE

    # ------------------------------------------------------------------ rows

    def new_row(self, values: Tensor) -> Tensor:
        """See `RowKeeping`."""
        row = self._memory.empty_like(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """See `RowKeeping`; writes the row out."""
        for start, stop in self._steps_through(row):
            row[start:stop].copy_(values[start:stop])
            self._memory.write_out([row[start:stop]])

    def read(self, row: Tensor, target: Tensor) -> None:
        """See `RowKeeping`."""
        for start, stop in self._steps_through(row):
            target[start:stop].copy_(row[start:stop])
            self._memory.drop([row[start:stop]])

    def _steps_through(self, row: Tensor) -> Iterator[tuple[int, int]]:
        step = max(1, self.budget // row.element_size())
        for start in range(0, row.numel(), step):
            yield start, min(row.numel(), start + step)

    def brought(self, values: Tensor) -> Tensor:
        """See `RowKeeping`."""
        return values

    def wait(self) -> None:
        """See `RowKeeping`; all methods are synchronous."""

    # ------------------------------------------------------------------ other tensors

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `RowKeeping`; small tensors stay in ordinary memory."""
        made: list[Tensor] = []
        try:
            for tensor in tensors:
                if not self._is_kept(tensor):
                    yield tensor.detach().clone()
                    continue
                if sum(map(nbytes_of, made)) + nbytes_of(tensor) > self.budget:
                    self._memory.write_out(made)
                    made.clear()
                made.append(self._memory.empty_like(tensor).copy_(tensor.detach()))
                yield made[-1]
        finally:
            self._memory.write_out(made)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Write used tensors out; those elsewhere move here first, as the same objects."""
        used = [tensor for tensor in tensors if self._is_kept(tensor)]
        for tensor in used:
            if not self._memory.holds(tensor):
                tensor.data = self._memory.empty_like(tensor).copy_(tensor.detach())
        self._memory.write_out(used)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """See `RowKeeping`."""
        kept.add_(tensor)
        self.keep([kept])

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Drop the pages of tensors that were only read."""
        self._memory.drop(tensors)

    def portions(self, items: Sequence[tuple[Item, int]]) -> Iterator[list[Item]]:
        """Split (item, bytes) pairs, in order, into lists within the budget; a larger item is alone."""
        portion: list[Item] = []
        total = 0
        for item, nbytes in items:
            if portion and total + nbytes > self.budget:
                yield portion
                portion, total = [], 0
            portion.append(item)
            total += nbytes
        if portion:
            yield portion


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def gradients_in_portions(
    keeping: Keeping | None, tensors: Sequence[Tensor], *, are_read: bool = False
) -> Iterator[list[Tensor]]:
    """Yield lists of gradients within the budget, one without files; ``are_read``: they stay unchanged."""
    if keeping is None:
        yield list(tensors)
        return
    for portion in keeping.portions([(tensor, nbytes_of(tensor)) for tensor in tensors]):
        yield portion
        if are_read:
            keeping.drop(portion)
        else:
            keeping.keep(portion)
