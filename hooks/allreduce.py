"""The all-reduce of `zero_step` without a hook of the user."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.work_log import noted_of
from zero_optim.comm.works import explained
from zero_optim.hooks.grad_bucket import GradBucket, TensorFuture
from zero_optim.host.messages import can_sum


def mean_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP without a hook: multiply by 1 / ranks. DDP divides views of a bucket."""
    group, buffer = dist.group.WORLD if state is None else state, bucket.buffer()
    if group is None:
        raise ValueError(
            "expected a process group, got none: call torch.distributed.init_process_group() first"
        )
    if buffer.is_sparse:
        return start_sum(group, buffer.div_(group.size()))
    return start_sum(group, buffer.mul_(1 / group.size()))


def start_sum(group: dist.ProcessGroup, tensor: Tensor) -> TensorFuture:
    """Start an in-place sum over all ranks; the future holds the tensor. An error names missing ranks."""
    works = noted_of(group)  # a gloo thread must not be the last to hold a group
    is_complex = tensor.is_complex()

    def summed(landed: torch.futures.Future[Any]) -> Tensor:
        try:
            total: Tensor = landed.value()[0]
        except RuntimeError as error:
            missing = explained(works, error)
            if missing is None:
                raise
            raise missing from error
        # Complex numbers travel as pairs of real ones.
        return torch.view_as_complex(total) if is_complex and not total.is_complex() else total

    memory = None if works is None else works.shared_memory
    future: torch.futures.Future[Any] = torch.futures.Future()
    if memory is None or not can_sum(tensor):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None  # async_op=True on a member of the group always returns a handle
        future = work.get_future()
        return future.then(summed)

    def end(failure: str | None) -> None:
        if failure is None:
            future.set_result([tensor])
        else:
            future.set_exception(dist.DistNetworkError(failure))

    memory.sum_all(tensor, end)
    return future.then(summed)
