"""How a rank keeps its rows and gradients: in ordinary memory, on an accelerator's host, or in mapped files.

Note [Kept on the host]
    With ``offload="cpu"`` what a rank owns lies in pinned host memory, and the optimizer steps on the CPU,
    which waits for copies only where rows (`Leaves.rows`, `RowBucket.places`) or gradients
    (`PartialGradient.piece`) are read. A device cannot add to host memory, so an earlier gradient returns to
    it, and the sum goes back.

Note [A budget]
    In files, what a rank owns lies in mapped memory (`zero_optim.shard.mapped`), except tensors smaller than
    a page. It is used in portions, each written out before the next: at most ``budget`` bytes are resident.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, LateCopies, host_memory, is_asynchronous
from zero_optim.shard.mapped import PAGE, MappedMemory, in_pages, why_not_here

Item = TypeVar("Item")


class RowKeeping:
    """Keeps rows and gradients in ordinary memory, on the parameters' device; other classes apart from it."""

    is_apart: ClassVar[bool] = False
    description: ClassVar[str] = "None"  # for ranks to compare

    def anew(self) -> "RowKeeping":
        """Return an empty one for another optimizer."""
        return self

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Reserve space for rows of these bytes; OSError if the disk has less."""

    def new_row(self, values: Tensor) -> Tensor:
        """Return a 1-D row with these values."""
        return values

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values to a row; the CPU waits if the row is on the host."""
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """Start to copy a row to a tensor of any dtype on the parameters' device."""
        target.copy_(row)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Store tensors again after use; those elsewhere move here first, as the same objects."""

    def brought(self, values: Tensor) -> Tensor:
        """Return values of the parameters' device where they can be compared with rows; the CPU waits."""
        return values

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return stored copies of tensors, valid after `wait`; in ordinary memory the tensors."""
        return iter(tensors)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a tensor to a stored one; the CPU does not wait."""
        kept.add_(tensor)

    def wait(self) -> None:
        """Block the CPU until stored tensors can be read and written."""


class HostKeeping(RowKeeping):
    """Keeps rows and gradients of an accelerator in host memory: Note [Kept on the host]."""

    is_apart = True
    description = '"cpu"'

    def __init__(self) -> None:
        self._copies = LateCopies()

    def anew(self) -> "HostKeeping":
        """See `RowKeeping`."""
        return HostKeeping()

    def wait(self) -> None:
        """See `RowKeeping`."""
        self._copies.wait()

    def new_row(self, values: Tensor) -> Tensor:
        """See `RowKeeping`."""
        row = host_memory(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """See `RowKeeping`."""
        self.wait()
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """See `RowKeeping`."""
        self._copies.to_place(target, row)

    def brought(self, values: Tensor) -> Tensor:
        """See `RowKeeping`."""
        return values.to("cpu") if values.is_sparse else HostCopy(values).read()

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `RowKeeping`."""
        return map(self._copies.to_host, tensors)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """See `RowKeeping`."""
        total = torch.empty_like(tensor, dtype=kept.dtype)
        self._copies.to_place(total, kept)
        self._copies.to_place(kept, total.add_(tensor))


class FileKeeping(RowKeeping):
    """Keeps tensors of the CPU in mapped files: Note [A budget]."""

    is_apart = True
    description = "an Offload"

    def __init__(self, memory: MappedMemory, budget: int) -> None:
        self._memory = memory
        self.budget = budget

    def anew(self) -> "FileKeeping":
        """See `RowKeeping`; in the same folder."""
        return FileKeeping(self._memory.anew(), self.budget)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the files."""
        return self._memory.holds(tensor)

    def reserve(self, nbytes: int) -> None:
        """See `MappedMemory.reserve`."""
        self._memory.reserve(nbytes)

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """See `RowKeeping`."""
        self._memory.reserve(sum(in_pages(max(1, each)) for each in nbytes))

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

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `RowKeeping`; small tensors stay in ordinary memory."""
        copies: list[Tensor] = []
        try:
            for tensor in tensors:
                if not _is_large(tensor):
                    yield tensor.detach().clone()
                    continue
                if sum(map(nbytes_of, copies)) + nbytes_of(tensor) > self.budget:
                    self._memory.write_out(copies)
                    copies.clear()
                copies.append(self._memory.empty_like(tensor).copy_(tensor.detach()))
                yield copies[-1]
        finally:
            self._memory.write_out(copies)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See `RowKeeping`; writes them out."""
        used = [tensor for tensor in tensors if _is_large(tensor)]
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


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep what a rank owns in mapped files: its rows of parameters and gradients, their state and averages.

    For parameters on the CPU, on Linux. The files have no names, can be read by nobody else, and are gone
    when the process ends, however it does. Ranks of one machine may use the same folder.

    Args:
        folder: an existing folder on a disk; not one in memory (tmpfs), where nothing would be gained.
        budget: how many bytes of that a rank may have resident at a time, while it is trained. At least what
            one parameter takes while it is stepped. What units take while they are whole comes on top.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the folder does not exist, or the budget is not above 0.
    """

    folder: str | os.PathLike[str]
    budget: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.folder, str | os.PathLike):
            raise TypeError(f"expected folder to be a path, got {self.folder!r}")
        if type(self.budget) is not int:
            raise TypeError(f"expected budget to be a number of bytes, got {self.budget!r}")
        if self.budget <= 0:
            raise ValueError(f"expected budget to be above 0 bytes, got {self.budget}")
        if not Path(self.folder).is_dir():
            raise ValueError(f"expected folder to be an existing folder, got {os.fspath(self.folder)!r}")


def keeping_for(offload: object, params: Iterable[Tensor]) -> RowKeeping:
    """Return how the rows of parameters are kept; TypeError or ValueError if that cannot be."""
    if offload is None:
        return RowKeeping()
    if offload == "cpu":
        here = next((param.device for param in params if not is_asynchronous(param.device)), None)
        if here is not None:
            raise ValueError(
                f'offload="cpu" is for a model on an accelerator, and there are parameters on {here}: leave '
                "it out, or give an Offload, which keeps things in files"
            )
        return HostKeeping()
    if not isinstance(offload, Offload):
        raise TypeError(f'expected offload to be an Offload, "cpu" or None, got {offload!r}')
    elsewhere = next((param.device for param in params if param.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ValueError(
            f"an Offload keeps parameters of the CPU in files, and these are on {elsewhere}: give "
            'offload="cpu" to keep them on the CPU'
        )
    reason = why_not_here()
    if reason is not None:
        raise ValueError(f"offload is not possible here: {reason}")
    return FileKeeping(MappedMemory(Path(offload.folder)), offload.budget)


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor has a page of its own in the files."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_plain and nbytes_of(tensor) >= PAGE


def gradients_in_portions(
    keeping: FileKeeping | None, tensors: Sequence[Tensor], *, are_read: bool = False
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
