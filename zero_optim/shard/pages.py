"""Memory of flat tensors that exists only while a unit is whole. No communication.

Note [Pages that move]
    On the CPU a flat tensor keeps its addresses. Freeing it moves its pages (``mremap``) to the next unit; a
    few repeated pages of a memory file then show NaN (zero for dtypes without), so kept views stay readable.
    New pages are zeroed, in 0.4 to 0.9 ms a MiB on a virtual machine (*huge pages* of 2 MiB, for which
    tensors are aligned, in 0.04 to 0.2); moving takes 0.03 ms.

    A *period* lasts from one moment without a whole unit to the next. Free pages wait only if the last period
    needed them at this point, which leaves memory for the gradients; pages that two periods did not need are
    returned. A freed unit takes up to 32 of ``vm.max_map_count`` mappings; without them it shows zeros.
    ``MREMAP_DONTUNMAP`` needs Linux 5.7; elsewhere, and on accelerators, the storage is emptied.
"""

import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zero_optim.compat.memory import (
    ANONYMOUS,
    MAP_FIXED,
    NO_RESERVE,
    PRIVATE,
    READ_WRITE,
    PageMoves,
    aligned,
    page_moves,
    with_room_to_align,
)
from zero_optim.compat.streams import is_asynchronous, record_use
from zero_optim.shard.mapped import in_pages

_MOST_RANGES = 32
_LEAST_RANGE = 2**16
_MOST_NOTED = 2**16  # stored changes of a period, which may be long

_MOVED = (
    "the memory of a fully sharded model's parameters was replaced, as share_memory() does: share a copy "
    "of them"
)


class UnitMemory:
    """The memory of one flat tensor, which PyTorch empties and grows. Make views before `free`."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._nbytes = flat.nbytes
        self.is_there = True

    def grow(self, *, stays: bool = False) -> None:
        """Allocate uninitialized memory unless present; ``stays``: it will never be freed."""
        self.flat.untyped_storage().resize_(self._nbytes)
        self.is_there = True

    def free(self) -> None:
        """Release the memory after the current stream's work."""
        if self.is_there:
            record_use(self.flat)  # perhaps it came on another stream, to which the memory goes back
        self.flat.untyped_storage().resize_(0)
        self.is_there = False


class PagedMemory(UnitMemory):
    """The memory of one CPU flat tensor: Note [Pages that move]. OSError without addresses."""

    def __init__(self, numel: int, dtype: torch.dtype, pages: "FreePages") -> None:
        nbytes = numel * torch.empty((), dtype=dtype).element_size()
        self._room = in_pages(nbytes)
        self._pages = pages
        length = with_room_to_align(self._room)
        addresses = mmap.mmap(-1, length, flags=PRIVATE | ANONYMOUS | NO_RESERVE, prot=READ_WRITE)
        octets = torch.frombuffer(addresses, dtype=torch.uint8)  # keeps the addresses
        begin = aligned(octets.data_ptr(), self._room) - octets.data_ptr()
        octets = torch.frombuffer(addresses, dtype=torch.uint8, count=nbytes, offset=begin)
        self._start = octets.data_ptr()
        self._shows_nan = _is_nan_by_octets(dtype)
        self.is_there = False
        self.flat = octets.view(dtype)
        pages.show_freed(self._start, self._room, nan=self._shows_nan)

    def grow(self, *, stays: bool = False) -> None:
        """See `UnitMemory`; RuntimeError if the storage got other memory."""
        if not self.is_there:
            self._check()
            self._pages.take(self._start, self._room, stays=stays)
            self.is_there = True

    def free(self) -> None:
        """See `grow`."""
        if self.is_there:
            self._check()
            self.is_there = False
            self._pages.give(self._start, self._room)
            self._pages.show_freed(self._start, self._room, nan=self._shows_nan)

    def _check(self) -> None:
        if self.flat.data_ptr() != self._start:
            raise RuntimeError(_MOVED)


class _Period:
    """The bytes in use after each change of a period."""

    def __init__(self, before: Sequence[int] = (), most_before: int = 0) -> None:
        self.in_use: list[int] = []
        self._now = self._most = 0
        self._before = before
        self._most_before = most_before
        self._to_come = list(accumulate(reversed(before), max))[::-1]
        self._is_alike = True

    def change(self, nbytes: int) -> None:
        number = len(self.in_use)
        self._now += nbytes
        self._most = max(self._most, self._now)
        self._is_alike = self._is_alike and number < len(self._before) and self._before[number] == self._now
        if number < _MOST_NOTED:
            self.in_use.append(self._now)

    @property
    def is_over(self) -> bool:
        return not self._now

    def may_wait(self) -> int:
        if self.is_over:
            return min(self._most, self._most_before)
        if self._is_alike:
            return self._to_come[len(self.in_use) - 1] - self._now
        return 0

    def next(self) -> "_Period":
        return _Period(self.in_use, self._most)


class FreePages:
    """Free pages for the next flat tensor, and pages of NaN: Note [Pages that move]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._system: PageMoves | None = None
        self._is_asked = False
        self._waiting: list[tuple[int, int]] = []  # bytes and address, in ascending order
        self.nbytes_waiting = 0
        self._period = _Period()
        self._nan_file = -1
        self._nan_nbytes = 0

    def __reduce__(self) -> "tuple[type[FreePages], tuple[()]]":
        """Copy and pickle as new."""
        return FreePages, ()

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> UnitMemory:
        """Create the memory of a flat tensor."""
        if device.type == "cpu" and not is_asynchronous(device) and numel:
            with self._lock:
                if not self._is_asked:
                    self._begin()
            if self._system is not None:
                try:
                    return PagedMemory(numel, dtype, self)
                except OSError:  # the process may have no more addresses
                    pass
        return UnitMemory(torch.empty(numel, dtype=dtype, device=device))

    def _begin(self) -> None:
        self._is_asked, self._system = True, page_moves()
        if self._system is not None:
            self._nan_file = os.memfd_create("freed units")
            weakref.finalize(self, os.close, self._nan_file).atexit = False
            weakref.finalize(self, _unmap, self._system.munmap, self._waiting).atexit = False

    def take(self, start: int, nbytes: int, *, stays: bool = False) -> None:
        """Map uninitialized pages at these addresses; MemoryError if the system gives none."""
        assert self._system is not None
        if stays:
            self._system.new_pages(start, nbytes)
            return
        with self._lock:
            self._period.change(nbytes)
            place = bisect_left(self._waiting, (nbytes, 0))  # the smallest that is enough
            if place < len(self._waiting):
                there, source = self._waiting.pop(place)
                self.nbytes_waiting -= nbytes
                if there > nbytes:
                    insort(self._waiting, (there - nbytes, source + nbytes))
                if self._system.moved_to(start, nbytes, source):
                    return
                self._system.munmap(source, nbytes)
            self._system.new_pages(start, nbytes)
            self._keep_at_most(self._period.may_wait())

    def give(self, start: int, nbytes: int) -> None:
        """Move the pages at these addresses away, and map fresh ones without memory."""
        assert self._system is not None
        with self._lock:
            self._period.change(-nbytes)
            away = self._system.moved_away(start, nbytes)
            if away is None:  # somebody has changed something of these pages, such as by mlock()
                self._system.new_pages(start, nbytes)
            else:
                insort(self._waiting, (nbytes, away))
                self.nbytes_waiting += nbytes
            self._keep_at_most(self._period.may_wait())
            if self._period.is_over:
                self._period = self._period.next()

    def _keep_at_most(self, nbytes: int) -> None:
        """Return excess pages to the system, the smallest pieces first, as others can be divided."""
        assert self._system is not None
        while self.nbytes_waiting > nbytes:
            there, source = self._waiting.pop(0)
            self._system.munmap(source, there)
            self.nbytes_waiting -= there

    def show_freed(self, start: int, nbytes: int, *, nan: bool) -> None:
        """Make fresh pages show NaN, or zeros without ``nan``."""
        if not nan:
            return
        assert self._system is not None
        length = max(_LEAST_RANGE, in_pages(-(-nbytes // _MOST_RANGES)))
        with self._lock:
            if self._nan_nbytes < length:
                os.pwrite(self._nan_file, b"\xff" * length, 0)
                self._nan_nbytes = length
        for offset in range(0, nbytes, length):
            size, flags = min(length, nbytes - offset), PRIVATE | MAP_FIXED | NO_RESERVE
            self._system.mmap(start + offset, size, READ_WRITE, flags, self._nan_file, 0)


def _is_nan_by_octets(dtype: torch.dtype) -> bool:
    """Whether bytes of ones are NaN, as in most dtypes with NaN."""
    one = torch.empty((), dtype=dtype).element_size()
    value = torch.full((one,), 0xFF, dtype=torch.uint8).view(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return bool(value.to(wide).isnan())


def _unmap(munmap: Callable[[int, int], object], waiting: list[tuple[int, int]]) -> None:
    for nbytes, source in waiting:
        munmap(source, nbytes)
