"""What a hook knows of a bucket: the public methods of ``torch.distributed.GradBucket``, and no more.

PyTorch's DDP looks at a hook's annotations and wants its own class there. To type checkers the name stands
for anything with these methods, such as the buckets of ``zero_optim.ddp``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:

    class GradBucket(Protocol):
        """Gradients that travel together."""

        def index(self) -> int:
            """Place in the order of reduction, the same on every rank."""

        def buffer(self) -> Tensor:
            """All gradients in one 1-D tensor, not yet divided; a sparse gradient as it is."""

        def set_buffer(self, tensor: Tensor) -> None:
            """Put another tensor of as many elements in its place."""

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

__all__ = ["GradBucket", "Hook", "TensorFuture", "dense_buffer", "name_of"]


def dense_buffer(bucket: GradBucket, name: str) -> Tensor:
    """Give the bucket's flat tensor, 1-D.

    Args:
        bucket: what the hook was given.
        name: the hook's name, for the message.

    Raises:
        ValueError: the bucket holds a sparse gradient, or a complex one.
    """
    buffer = bucket.buffer()
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        kind = buffer.dtype if buffer.layout == torch.strided else buffer.layout
        raise ValueError(
            f"{name} expected dense gradients of real numbers, got {kind} in bucket {bucket.index()}: make "
            "them so (for an embedding sparse=False), or use allreduce_hook"
        )
    return buffer


def name_of(hook: Hook) -> str:
    """Name a hook, be it a function or an object that is called."""
    return getattr(hook, "__name__", type(hook).__name__)
