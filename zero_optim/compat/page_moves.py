"""Pages of memory that are moved from some addresses to others, with what is in them (Linux).

What they are moved for: Note [Pages that move] in `zero_optim.shard.unit_memory`.
"""

import ctypes
import mmap
import os
import sys
from typing import Any

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE = getattr(mmap, "MAP_PRIVATE", 2)
ANONYMOUS = getattr(mmap, "MAP_ANONYMOUS", 0x20)
MAP_FIXED = 0x10
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # most addresses have no memory at a time
_MAY_MOVE, _FIXED, _DONT_UNMAP = 1, 2, 4  # of mremap
_FAILED = ctypes.c_void_p(-1).value
_HUGE = 2**21  # bytes of a huge page, on most systems
_WANTS_HUGE = 14  # for madvise


def with_room_to_align(nbytes: int) -> int:
    """Return how many addresses to ask for, so that `aligned` finds so many among them."""
    return nbytes + _HUGE if nbytes >= _HUGE else nbytes


def aligned(start: int, nbytes: int) -> int:
    """Return where something begins that may have huge pages, at or behind some address."""
    return -(-start // _HUGE) * _HUGE if nbytes >= _HUGE else start


class PageMoves:
    """Calls of the C library that Python does not have."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.mmap: Any = library.mmap
        self.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
        self.mmap.restype = address
        self.mremap: Any = library.mremap
        self.mremap.argtypes = (address, size, size, number, address)
        self.mremap.restype = address
        self.munmap: Any = library.munmap
        self.munmap.argtypes = (address, size)
        self.madvise: Any = library.madvise
        self.madvise.argtypes = (address, size, number)

    def new_pages(self, start: int, nbytes: int) -> None:
        """Have fresh pages at some addresses.

        Raises:
            MemoryError: the system gives none.
        """
        flags = PRIVATE | ANONYMOUS | MAP_FIXED | NO_RESERVE
        if self.mmap(start, nbytes, READ_WRITE, flags, -1, 0) != start:
            why = os.strerror(ctypes.get_errno())
            raise MemoryError(f"{nbytes} bytes to make a unit of a fully sharded model whole: {why}")
        if nbytes >= _HUGE:  # all of it: pages with different wishes cannot be moved at once
            self.madvise(start, nbytes, _WANTS_HUGE)

    def moved_away(self, start: int, nbytes: int) -> int | None:
        """Move pages away, and give where they are; there are fresh ones in their place. None if not."""
        length = with_room_to_align(nbytes)
        begin: int = self.mmap(None, length, 0, PRIVATE | ANONYMOUS | NO_RESERVE, -1, 0)
        if begin == _FAILED:
            return None
        target = aligned(begin, nbytes)
        found: int = self.mremap(start, nbytes, nbytes, _MAY_MOVE | _FIXED | _DONT_UNMAP, target)
        for rest, end in ((begin, target), (target + nbytes, begin + length)):
            if end > rest:
                self.munmap(rest, end - rest)
        # If it failed, another thread may have the target by now, so it is not unmapped: it has no memory.
        return target if found == target else None

    def moved_to(self, start: int, nbytes: int, source: int) -> bool:
        """Move pages to some addresses; whether that was possible."""
        return bool(self.mremap(source, nbytes, nbytes, _MAY_MOVE | _FIXED, start) == start)


def page_moves() -> PageMoves | None:
    """Give the calls; None if this system does not have what is needed here."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        system = PageMoves()
        with mmap.mmap(-1, mmap.PAGESIZE, flags=PRIVATE | ANONYMOUS, prot=READ_WRITE) as page:
            page[0] = 1
            start = ctypes.addressof(ctypes.c_char.from_buffer(page))
            away = system.moved_away(start, mmap.PAGESIZE)
            if away is None or page[0] != 0:
                return None
            return system if system.moved_to(start, mmap.PAGESIZE, away) and page[0] == 1 else None
    except (AttributeError, BufferError, OSError):
        return None
