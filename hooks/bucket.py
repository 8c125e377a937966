"""The public methods of ``torch.distributed.GradBucket``, and helpers for its buffer.

PyTorch's DDP requires its own class as annotation; type checkers accept any class with these methods.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from zero_optim.plan.strides import consecutive_views

if TYPE_CHECKING:

    class GradBucket(Protocol):
        """Gradients that are reduced together."""

        def index(self) -> int:
            """Place in the order of reduction, the same on every rank."""

        def buffer(self) -> Tensor:
            """Undivided gradients in one 1-D tensor, or one sparse gradient.

            PyTorch's DDP stores complex gradients as twice as many real numbers.
            """

        def set_buffer(self, tensor: Tensor) -> None:
            """Replace the buffer by a tensor with as many elements."""

        def gradients(self) -> list[Tensor]:
            """Views of the buffer with the parameters' shapes."""

        def parameters(self) -> list[Tensor]:
            """The parameters, in the same order."""

        def is_last(self) -> bool:
            """Whether it is the last bucket of this backward pass."""

else:
    from torch.distributed import GradBucket

TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]
Hook: TypeAlias = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]

__all__ = ["GradBucket", "Hook", "TensorFuture", "dense_buffer", "gradients_in", "name_of", "real_buffer"]


def dense_buffer(bucket: GradBucket, name: str) -> Tensor:
    """Return the bucket's 1-D flat tensor; ValueError, with the hook's name, if sparse or complex."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        kind = buffer.dtype if buffer.layout == torch.strided else buffer.layout
        raise ValueError(
            f"{name} expected dense gradients of real numbers, got {kind} in bucket {bucket.index()}: make "
            "them so (for an embedding sparse=False), or use allreduce_hook"
        )
    return buffer


def real_buffer(bucket: GradBucket, name: str) -> Tensor:
    """Return the bucket's buffer as 1-D real numbers, two for a complex one; refuses sparse ones."""
    buffer = bucket.buffer()
    if buffer.layout == torch.strided and buffer.is_complex():  # our DDP's; PyTorch's is real already
        return torch.view_as_real(buffer).view(-1)
    return dense_buffer(bucket, name)


def gradients_in(reduced: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View each parameter's gradient, with its strides, in a dense reduced bucket of any dtype."""
    flat, dtype = reduced.reshape(-1), params[0].dtype
    if dtype.is_complex and not flat.is_complex():  # PyTorch's DDP has real numbers in the bucket
        flat = torch.view_as_complex(flat.to(dtype.to_real()).view(-1, 2))
    return consecutive_views(flat.to(dtype), params)


def name_of(hook: Hook) -> str:
    """Return the name of a hook function or object."""
    return getattr(hook, "__name__", type(hook).__name__)
