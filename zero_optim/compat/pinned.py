"""Pinned memory of the host in the size that was asked for.

Note [Pinned in full]
    PyTorch rounds pinned memory up to a power of two, and never gives it back: rows of a model on the host
    took up to twice their size. So what stays for long is memory of the system, page by page, which is told
    to CUDA. To tell it takes as long as PyTorch's way does, so this is not for what comes and goes. Nobody
    notes which copies are under way when it ends. So the CPU then waits for the device. The pages are shared
    with forked processes: a page that is copied when it is written next would not be the one that CUDA knows.
"""

import mmap
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class _Pages(mmap.mmap):
    """Memory that CUDA knows; it forgets it before the memory goes."""

    module: Any = None  # PyTorch's module for the device; None until the pages are registered
    device: torch.device
    address: int

    def __del__(self) -> None:
        if self.module is not None and not sys.is_finalizing():
            with suppress(RuntimeError):  # of a device that has failed
                self.module.synchronize(self.device)
            self.module.cudart().cudaHostUnregister(self.address)


def pinned_in_full(like: Tensor, module: Any) -> Tensor | None:  # noqa: ANN401 - a module
    """Make pinned memory of exactly the size of a tensor; see Note [Pinned in full].

    Args:
        like: 1-D, on an accelerator.
        module: PyTorch's module for that, such as ``torch.cuda``.

    Returns:
        A tensor on the host; None for a device without such a call, or without elements.

    Raises:
        RuntimeError: the system has not so much memory that can be pinned.
    """
    if not hasattr(module, "cudart") or not like.numel():
        return None
    pages = _Pages(-1, like.nbytes)
    tensor = torch.frombuffer(pages, dtype=like.dtype)  # keeps the pages
    error = int(module.cudart().cudaHostRegister(tensor.data_ptr(), like.nbytes, _PORTABLE))
    if error:  # CUDA would tell of it once more in its next call, so nothing else can be tried
        raise RuntimeError(
            f"could not pin {like.nbytes} bytes of host memory for what {like.device} copies (CUDA error "
            f"{error}): free host memory, raise the limit of locked memory, or do not offload"
        )
    pages.module, pages.device, pages.address = module, like.device, tensor.data_ptr()
    return tensor
