"""Host memory: what the C library keeps, pages that go back, pages that CUDA knows.

Note [Blocks that the C library keeps]
    glibc keeps freed small blocks in its heap, and returns large ones to the system. The limit rises up to 32
    MiB with the blocks that are freed. A fully sharded model with units of 3 MiB took 9 to 32 % more than its
    tensors, with a fixed limit 3 %. That costs CPU time, as the system zeroes pages: 0.5 ms a MiB.

Note [Pinned in full]
    PyTorch rounds pinned memory up to a power of two and never returns it. So lasting memory is the system's,
    registered with CUDA. Nobody tracks its pending copies, so its end waits for the device.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zero_optim.compat import private

_MOST = 2**25  # glibc takes no higher limit


def return_freed_memory(threshold: int = 2**16) -> None:
    """Have the C library return freed blocks of ``threshold`` bytes or more to the system, from now on.

    Resident memory is then what tensors take, where it may be a quarter more; it costs CPU time, see Note
    [Blocks that the C library keeps]. No communication; ranks may differ. The same as
    ``MALLOC_MMAP_THRESHOLD_=65536`` in the environment of a new process. TypeError if ``threshold`` is no
    integer, ValueError if it is less than a page or more than 32 MiB, RuntimeError without glibc.
    """
    if type(threshold) is not int:
        raise TypeError(f"expected threshold to be a number of bytes, got {threshold!r}")
    if not mmap.PAGESIZE <= threshold <= _MOST:
        raise ValueError(f"expected threshold to be {mmap.PAGESIZE} to {_MOST} bytes, got {threshold}")
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        raise RuntimeError(
            "return_freed_memory() sets an option of glibc, and this process has another C library: "
            "leave it out here"
        )
    if library.mallopt(-3, threshold) != 1:  # M_MMAP_THRESHOLD of malloc.h
        raise RuntimeError(f"glibc refused {threshold} bytes as the limit of blocks to be returned")
    library.malloc_trim(0)


def is_seen_by_others(tensor: Tensor) -> bool:
    """Return whether another tensor or array, no view, may share this memory; True if unknown."""
    count = private.or_none("storage_Use_Count")
    storage = tensor.untyped_storage()
    return count is None or count(private.cdata(storage)) > 2  # the tensor, and the Python object


def seen_outside(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of those whose memory something else may have: tensors not among them, or an array."""
    count = private.or_none("storage_Use_Count")
    members: dict[int, list[Tensor]] = {}
    for tensor in tensors if count is not None else ():
        members.setdefault(private.cdata(tensor.untyped_storage()), []).append(tensor)
    return {id(tensor) for key, of in members.items() if count(key) > len(of) + 1 for tensor in of}


def give_back_pages(tensor: Tensor) -> None:
    """Return the pages that a CPU tensor fills to the system, on Linux; they then show zeros."""
    _advise(tensor, 4)  # MADV_DONTNEED


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Have the system fill a new, large CPU tensor with huge pages, on Linux: they are zeroed faster."""
    if tensor.nbytes >= 2**22:  # a smaller block may hold no whole huge page, of 2 MiB on most systems
        _advise(tensor, 14)  # MADV_HUGEPAGE


def _advise(tensor: Tensor, advice: int) -> None:
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


class _Pages(mmap.mmap):
    """Memory that CUDA unregisters before it goes."""

    module: Any = None  # PyTorch's module for the device; None until the pages are registered
    device: torch.device
    address: int

    def __del__(self) -> None:
        if self.module is not None and not sys.is_finalizing():
            with suppress(RuntimeError):  # of a device that has failed
                self.module.synchronize(self.device)
            self.module.cudart().cudaHostUnregister(self.address)


def pinned_in_full(like: Tensor, module: Any) -> Tensor | None:  # noqa: ANN401 - a module, such as torch.cuda
    """Allocate pinned host memory like a 1-D device tensor, None without CUDA: Note [Pinned in full]."""
    if not hasattr(module, "cudart") or not like.numel():
        return None
    pages = _Pages(-1, like.nbytes)
    tensor = torch.frombuffer(pages, dtype=like.dtype)  # keeps the pages
    portable = 1  # cudaHostRegisterPortable: for all devices
    error = int(module.cudart().cudaHostRegister(tensor.data_ptr(), like.nbytes, portable))
    if error:  # CUDA would tell of it once more in its next call, so nothing else can be tried
        raise RuntimeError(
            f"could not pin {like.nbytes} bytes of host memory for what {like.device} copies (CUDA error "
            f"{error}): free host memory, raise the limit of locked memory, or do not offload"
        )
    pages.module, pages.device, pages.address = module, like.device, tensor.data_ptr()
    return tensor
