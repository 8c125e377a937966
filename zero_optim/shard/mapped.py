"""CPU tensors in mapped files.

Note [Pages that are dropped]
    `MappedMemory.write_out` writes changed pages to the file (``msync``) and drops them from memory
    (``madvise``, MADV_DONTNEED, on Linux only); the next use reads the file. ``posix_fallocate`` reserves
    blocks, or a full disk would show as SIGBUS. Files have no name and end with the process. glibc keeps
    freed memory, more than all else in a step, so it is trimmed too.

Note [Memory that comes back]
    Each tensor's own storage holds a view of the file, whose place is reused when the storage is dropped. So
    a gradient that the user holds keeps its values.
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
from pathlib import Path

import torch
from torch import Tensor

from zero_optim.plan.strides import dense_strides

PAGE = mmap.PAGESIZE
_LEAST_FILE_NBYTES = 2**24


def why_not_here() -> str | None:
    """Return why this system cannot drop pages, or None."""
    if sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED"):
        return None
    return f"pages of mapped files can be dropped on Linux only, and this is {sys.platform}"


def in_pages(nbytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class _File:
    """A nameless, mapped file of whole pages."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.map = mmap.mmap(file.fileno(), nbytes)
        self.address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        self.nbytes = nbytes
        self.used = 0

    def take(self, nbytes: int) -> int | None:
        """Return the offset of unused pages, or None."""
        if self.used + nbytes > self.nbytes:
            return None
        offset, self.used = self.used, self.used + nbytes
        return offset


class MappedMemory:
    """Tensors in files of an existing folder; see Note [Pages that are dropped]."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._free: dict[int, list[tuple[_File, int]]] = {}  # by bytes; see Note [Memory that comes back]

    def anew(self) -> "MappedMemory":
        """Return one for the same folder, with new files."""
        return MappedMemory(self._folder)

    def reserve(self, nbytes: int) -> None:
        """Create a file of this size, so that `take` cannot fail; OSError if the disk has less."""
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
        """Return uninitialized uint8 memory, 1-D; reused when its storage is dropped."""
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
        """Return an uninitialized dense tensor like another."""
        copy = self.take(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return copy.as_strided(tensor.shape, dense_strides(tensor.detach()))

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
        """Write changed pages to the files and drop them; waits for the disk, ignores other tensors."""
        used = list(self._pages(tensors))
        for file, start, length in used:
            file.map.flush(start, length)
        self._drop(used)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Drop the pages of unchanged tensors."""
        self._drop(list(self._pages(tensors)))

    def _drop(self, used: Sequence[tuple[_File, int, int]]) -> None:
        for file, start, length in used:
            file.map.madvise(mmap.MADV_DONTNEED, start, length)
        if used and self._trim is not None:
            self._trim(0)

    def _pages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[_File, int, int]]:
        """Yield file, offset and length of the pages of each tensor that is in a file."""
        for tensor in tensors:
            file = self._file_of(tensor)
            if file is not None and tensor.numel():
                extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                offset = tensor.data_ptr() - file.address
                start = offset // PAGE * PAGE
                yield file, start, in_pages(offset + extent * tensor.element_size()) - start
