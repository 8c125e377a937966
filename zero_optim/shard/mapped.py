"""Memory in files: CPU tensors whose bytes the system reads and writes when they are used. No communication.

Note [Pages that are dropped]
    `MappedMemory.write_out` has changed pages written to the file (``msync``) and takes them out of this
    process (``madvise``, MADV_DONTNEED); the next use reads them again. The mapping is shared, so nothing
    is lost. The page cache may keep a copy, which is given up as soon as memory is wanted. Linux does this;
    elsewhere it is refused. The blocks of a file are reserved when it is made (``posix_fallocate``): else a
    full disk would show at a write to memory, as SIGBUS. A file has no name, and is gone with the process.
    glibc keeps freed memory for later, which in a step was more than anything else, so whenever pages are
    dropped it is asked to return what is free.

Note [Memory that comes back]
    Each tensor has a storage of its own, which holds a view of the file. When the storage is dropped, its
    place can be taken again. So a gradient that a user still holds keeps its values.
"""

import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_optim.plan.memory import dense_strides

PAGE = mmap.PAGESIZE
_LEAST_FILE_NBYTES = 2**24


def why_not_here() -> str | None:
    """Return why this system cannot drop pages; None if it can."""
    if sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED"):
        return None
    return f"pages of mapped files can be dropped on Linux only, and this is {sys.platform}"


def in_pages(nbytes: int) -> int:
    """Round a number of bytes up to pages."""
    return -(-nbytes // PAGE) * PAGE


class _File:
    """A file without a name, mapped as a whole; its size is a multiple of a page."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.map = mmap.mmap(file.fileno(), nbytes)
        self.address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        self.nbytes = nbytes
        self.used = 0

    def take(self, nbytes: int) -> int | None:
        """Take pages that were never used; returns their offset, None if there are not enough."""
        if self.used + nbytes > self.nbytes:
            return None
        offset, self.used = self.used, self.used + nbytes
        return offset


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    """Bytes of a file, whole pages."""

    start: int
    stop: int


class MappedMemory:
    """Tensors in files of a folder; see Note [Pages that are dropped].

    Args:
        folder: an existing folder on the disk to use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._free: dict[int, list[tuple[_File, int]]] = {}  # by bytes; see Note [Memory that comes back]

    def anew(self) -> "MappedMemory":
        """Make one for the same folder, with files of its own."""
        return MappedMemory(self._folder)

    def reserve(self, nbytes: int) -> None:
        """Make a file for so many bytes, so that taking them cannot fail; an OSError if the disk has less."""
        if nbytes > 0:
            self._add_file(in_pages(nbytes))

    def _add_file(self, nbytes: int) -> _File:
        free = shutil.disk_usage(self._folder).free
        try:
            if free < nbytes:
                raise OSError(errno.ENOSPC, "less is free")
            file = _File(self._folder, nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expected to reserve {nbytes} bytes in {str(self._folder)!r} to keep state there, but "
                f"{free} bytes are free ({os.strerror(error.errno or 0)}): give a folder on a larger disk, "
                "or one for each rank",
            ) from None
        self._files.append(file)
        return file

    def take(self, nbytes: int) -> Tensor:
        """Return memory that nobody uses: bytes, 1-D, of any values. It comes back when it is dropped."""
        size = in_pages(max(1, nbytes))
        with self._lock:  # gradients are taken over on other threads
            free = self._free.setdefault(size, [])
            file, offset = free.pop() if free else self._new_place(size)
        view = memoryview(file.map)[offset : offset + max(1, nbytes)]
        weakref.finalize(view, free.append, (file, offset)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[:nbytes]

    def _new_place(self, nbytes: int) -> tuple[_File, int]:
        for file in self._files:
            offset = file.take(nbytes)
            if offset is not None:
                return file, offset
        file = self._add_file(max(nbytes, _LEAST_FILE_NBYTES))
        offset = file.take(nbytes)
        assert offset is not None
        return file, offset

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make a tensor in the form of another one, without gaps, of any values."""
        made = self.take(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return made.as_strided(tensor.shape, dense_strides(tensor.detach()))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return self._file_of(tensor) is not None

    def _file_of(self, tensor: Tensor) -> _File | None:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        address = tensor.untyped_storage().data_ptr()
        return next((f for f in self._files if f.address <= address < f.address + f.nbytes), None)

    # ------------------------------------------------------------------ pages

    def write_out(self, tensors: Iterable[Tensor]) -> None:
        """Write changed pages of tensors to the files, and drop them; waits for the disk.

        Tensors that are elsewhere are left alone.
        """
        used = list(self._pages(tensors))
        for file, pages in used:
            file.map.flush(pages.start, pages.stop - pages.start)
        self._drop(used)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Drop the pages of tensors that were only read; does not wait for the disk."""
        self._drop(list(self._pages(tensors)))

    def _drop(self, used: Sequence[tuple[_File, _Range]]) -> None:
        for file, pages in used:
            file.map.madvise(mmap.MADV_DONTNEED, pages.start, pages.stop - pages.start)
        if used and self._trim is not None:
            self._trim(0)

    def _pages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[_File, _Range]]:
        """Yield the pages of tensors, those next to each other together."""
        by_file: dict[int, list[_Range]] = {}
        for tensor in tensors:
            file = self._file_of(tensor)
            if file is not None and tensor.numel():
                extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                start = tensor.data_ptr() - file.address
                stop = in_pages(start + extent * tensor.element_size())
                number = self._files.index(file)
                by_file.setdefault(number, []).append(_Range(start // PAGE * PAGE, stop))
        for number, ranges in by_file.items():
            for pages in _joined(sorted(ranges)):
                yield self._files[number], pages


def _joined(ranges: list[_Range]) -> Iterator[_Range]:
    """Join ranges that touch or overlap, given in ascending order."""
    current = ranges[0]
    for following in ranges[1:]:
        if following.start > current.stop:
            yield current
            current = following
        else:
            current = _Range(current.start, max(current.stop, following.stop))
    yield current
