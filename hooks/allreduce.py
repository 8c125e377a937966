"""Hooks that average gradients by one all-reduce, and its helpers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.works import GroupWorks, explained, noted_of
from zero_optim.hooks.bucket import GradBucket, TensorFuture


def allreduce_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks by one all-reduce, in place and in its own dtype, also if sparse.

    Each rank divides before the sum, as in PyTorch's hook of this name. ``state`` is the process group; None
    for the default one. The backend must be able to sum the dtype.
    """
    return start_average(group_of(state), bucket.buffer())


def mean_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the bits of DDP without a hook: multiply by 1 / number of ranks.

    DDP divides gradients that are views of their bucket; a hook cannot know.
    """
    group, buffer = group_of(state), bucket.buffer()
    if buffer.is_sparse:
        return start_average(group, buffer)
    return start_sum(group, buffer.mul_(1 / group.size()))


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group for None."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError(
            "expected a process group, got none: call torch.distributed.init_process_group() first"
        )
    return group


def start_sum(group: dist.ProcessGroup, tensor: Tensor) -> TensorFuture:
    """Start an in-place sum over all ranks; the future holds the tensor."""
    future = _future(dist.all_reduce(tensor, group=group, async_op=True))
    is_complex, works = tensor.is_complex(), noted_of(group)

    def summed(landed: torch.futures.Future[Any]) -> Tensor:
        total: Tensor = _value(landed, works)[0]
        # Complex numbers travel as pairs of real ones.
        return torch.view_as_complex(total) if is_complex and not total.is_complex() else total

    return future.then(summed)


def start_average(group: dist.ProcessGroup, tensor: Tensor) -> TensorFuture:
    """Start an in-place mean; each rank divides first, so that 16 bits do not overflow."""
    return start_sum(group, tensor.div_(group.size()))


def _future(work: dist.Work | None) -> torch.futures.Future[Any]:
    assert work is not None  # async_op=True on a member of the group always returns a handle
    future: torch.futures.Future[Any] = work.get_future()
    return future


def _value(landed: torch.futures.Future[Any], works: GroupWorks | None) -> Any:  # noqa: ANN401 - by backend
    """Return a collective's result; an error names missing ranks.

    A future must not hold the group, or a gloo thread would release it last.
    """
    try:
        return landed.value()
    except RuntimeError as error:
        missing = explained(works, error)
        if missing is None:
            raise
        raise missing from error
