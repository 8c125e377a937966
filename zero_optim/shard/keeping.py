"""What a rank owns, kept elsewhere than in ordinary memory. Nothing here communicates.

Note [A budget]
    A rank's rows of the parameters, their reduced gradients, state, masters and averages are in mapped
    files (`zero_optim.shard.mapped`). At most ``budget`` bytes of them are resident, as they are used in
    portions, each written out before the next. Tensors smaller than a page stay in ordinary memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_optim.shard.mapped import PAGE, MappedMemory, in_pages

Item = TypeVar("Item")


class RowKeeping(Protocol):
    """Keeps the rows and gradients that a rank owns elsewhere than the parameters are."""

    def anew(self) -> "RowKeeping":
        """Make one for another optimizer."""

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Make sure that there is room for rows of so many bytes."""

    def new_row(self, values: Tensor) -> Tensor:
        """Make a row, 1-D, with some values."""

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values to a row."""

    def read(self, row: Tensor, target: Tensor) -> None:
        """Copy a row to where the parameters are."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors back that were used."""

    def brought(self, values: Tensor) -> Tensor:
        """Return values from where the parameters are for comparison with rows."""

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copy tensors to where they are kept."""

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a tensor to one that is kept."""

    def wait(self) -> None:
        """Wait on the CPU until what is kept can be read and written."""


class Keeping:
    """Keeps tensors in mapped files, of which ``budget`` bytes may be resident; see Note [A budget]."""

    def __init__(self, memory: MappedMemory, budget: int) -> None:
        self._memory = memory
        self.budget = budget

    def anew(self) -> "Keeping":
        """Make one with the same budget, and files of its own in the same folder."""
        return Keeping(self._memory.anew(), self.budget)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the files."""
        return self._memory.holds(tensor)

    def reserve(self, nbytes: int) -> None:
        """See `MappedMemory.reserve`."""
        self._memory.reserve(nbytes)

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Reserve what `new_row` will take for rows of so many bytes; an OSError if the disk has less."""
        self._memory.reserve(sum(in_pages(max(1, each)) for each in nbytes))

    def _is_kept(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        return is_plain and tensor.numel() * tensor.element_size() >= PAGE

    # ------------------------------------------------------------------ rows

    def new_row(self, values: Tensor) -> Tensor:
        """Make a row, 1-D, with some values."""
        row = self._memory.empty_like(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values to a row, and write it out."""
        for start, stop in self._steps_through(row):
            row[start:stop].copy_(values[start:stop])
            self._memory.write_out([row[start:stop]])

    def read(self, row: Tensor, target: Tensor) -> None:
        """Copy a row to ordinary memory."""
        for start, stop in self._steps_through(row):
            target[start:stop].copy_(row[start:stop])
            self._memory.drop([row[start:stop]])

    def _steps_through(self, row: Tensor) -> Iterator[tuple[int, int]]:
        step = max(1, self.budget // row.element_size())
        for start in range(0, row.numel(), step):
            yield start, min(row.numel(), start + step)

    def brought(self, values: Tensor) -> Tensor:
        """Return values as they are: ordinary memory can be compared with rows."""
        return values

    def wait(self) -> None:
        """Return at once: calls here have done their work."""

    # ------------------------------------------------------------------ other tensors

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copy tensors to the files, one after the other, small ones to ordinary memory."""
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
        """Write tensors out that were used, after those elsewhere have moved here, as the same objects."""
        used = [tensor for tensor in tensors if self._is_kept(tensor)]
        for tensor in used:
            if not self._memory.holds(tensor):
                tensor.data = self._memory.empty_like(tensor).copy_(tensor.detach())
        self._memory.write_out(used)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a tensor to one that is kept."""
        kept.add_(tensor)
        self.keep([kept])

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors back that were only read."""
        self._memory.drop(tensors)

    def portions(self, items: Sequence[tuple[Item, int]]) -> Iterator[list[Item]]:
        """Divide items, each with its bytes, in lists within the budget, in order; a larger one is alone."""
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
    """Yield gradients in lists, as many as may be resident; one list if they are in ordinary memory.

    ``are_read``: they will only be read.
    """
    if keeping is None:
        yield list(tensors)
        return
    for portion in keeping.portions([(tensor, nbytes_of(tensor)) for tensor in tensors]):
        yield portion
        if are_read:
            keeping.drop(portion)
        else:
            keeping.keep(portion)
