"""What the C library does with memory that was freed.

Note [Blocks that the C library keeps]
    A CPU tensor is a block of the C library. glibc takes a small block from its heap, and asks the system for
    a large one, which goes back to the system when it is freed. At first a block is large from 128 KiB on.
    But whenever a large one is freed, the limit becomes its size, up to 32 MiB. From then on blocks up to
    that size come from the heap. There a freed block stays, to be used again. Where blocks that stay lie
    between blocks that come and go, such as the gradients of owners between those of a backward pass, what is
    free is in pieces, and a block that fits into none makes the heap grow.

    So a fully sharded model whose units have less than 32 MiB may take more resident memory than the sum of
    its tensors: in the test 18 to 32 % more, for units of 3 MiB, although the units themselves are in memory
    that the heap knows nothing of. With the reduced gradients there too it was the same, with all that is
    sent and received as well 9 to 12 %: the gradients that autograd makes come and go in the heap, and glibc
    2.36 finds no room for an aligned block where one of the same size was. With a fixed limit it is 2.5 to
    3 %.

    A fixed limit costs CPU time, as the system zeroes each page of a block when it is first touched: on a
    virtual machine 0.5 ms a MiB, where a copy to memory that is there takes 0.03 ms. So which one is better
    depends on the program, and the setting is one for the whole process. It is the user's: nothing here
    changes it unasked.

Note [Pages given back early]
    A storage is released as a whole. Where many tensors lie in one block and move out of it one by one, the
    block stays until the last one has left, beside the memory that they have moved to. `give_back_pages`
    tells the system that the pages of one of them are not needed any more. The block keeps its addresses, and
    the pages show zeros from then on. So it is for memory that this library has made itself, and that nobody
    can see any more: `is_seen_by_others` counts who refers to a storage.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_M_MMAP_THRESHOLD = -3  # of malloc.h
_MOST = 2**25  # glibc takes no higher limit
_MADV_DONTNEED = 4  # of Linux's mman.h


def return_freed_memory(threshold: int = 2**16) -> None:
    """Have the C library return freed memory to the system at once, in this process from now on.

    Resident memory is then what tensors take, where it may be a quarter more. It costs CPU time: see Note
    [Blocks that the C library keeps]. What is free at the moment is returned too. Does not communicate; ranks
    may differ. The same as ``MALLOC_MMAP_THRESHOLD_=65536`` in the environment of a new process.

    Args:
        threshold: blocks of at least so many bytes are returned when they are freed.

    Raises:
        TypeError: ``threshold`` is no integer.
        ValueError: it is less than a page, or more than 32 MiB.
        RuntimeError: the C library is another one than glibc. Nothing has changed.
    """
    if type(threshold) is not int:
        raise TypeError(f"expected threshold to be a number of bytes, got {threshold!r}")
    if not mmap.PAGESIZE <= threshold <= _MOST:
        raise ValueError(f"expected threshold to be {mmap.PAGESIZE} to {_MOST} bytes, got {threshold}")
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        raise RuntimeError(
            "return_freed_memory() sets an option of glibc, and this process has another C library: leave it "
            "out here"
        )
    if library.mallopt(_M_MMAP_THRESHOLD, threshold) != 1:
        raise RuntimeError(f"glibc refused {threshold} bytes as the limit of blocks to be returned")
    library.malloc_trim(0)


def is_seen_by_others(tensor: Tensor) -> bool:
    """Whether another tensor, or an array, may have the memory of a tensor. True where PyTorch cannot tell.

    Args:
        tensor: is itself no view.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return count is None or count(storage._cdata) > 2  # the tensor, and the Python object


def give_back_pages(tensor: Tensor) -> None:
    """Give the pages that a tensor fills back to the system, on Linux; see Note [Pages given back early].

    Its elements there are zeros from then on. Others that lie in the same pages, and elsewhere all, stay.

    Args:
        tensor: without gaps; on the CPU, or nothing is done.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:  # where the system refuses, as it does for locked pages, they stay until they are freed
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)
