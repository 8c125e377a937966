"""Hooks that average gradients by one all-reduce, in their dtype or in 16 bits.

float16 has 10 bits of mantissa and overflows above 65504 (Micikevicius et al., *Mixed Precision Training*,
arXiv:1710.03740). bfloat16 has 7 and the range of float32 (Kalamkar et al., arXiv:1905.12322).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.work_log import noted_of
from zero_optim.comm.works import explained
from zero_optim.compat.streams import record_use
from zero_optim.hooks.grad_bucket import GradBucket, Hook, TensorFuture, dense_buffer, name_of
from zero_optim.host.messages import can_sum


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
    if memory is None or not can_sum(tensor):
        return _start(group, tensor).then(summed)
    future: torch.futures.Future[Any] = torch.futures.Future()

    def end(failure: str | None) -> None:
        if failure is None:
            future.set_result([tensor])
        else:
            future.set_exception(dist.DistNetworkError(failure))

    memory.sum_all(tensor, end)
    return future.then(summed)


def _start(group: dist.ProcessGroup, tensor: Tensor) -> torch.futures.Future[Any]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None  # async_op=True on a member of the group always returns a handle
    future: torch.futures.Future[Any] = work.get_future()
    return future


def start_average(group: dist.ProcessGroup, tensor: Tensor) -> TensorFuture:
    """Start an in-place mean; each rank divides first, so that 16 bits do not overflow."""
    return start_sum(group, tensor.div_(group.size()))


def fp16_compress_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average dense floating-point gradients over all ranks by one all-reduce in float16.

    The result has the bucket's dtype. ``state`` is the process group; None for the default one.
    """
    return _run_in(torch.float16, allreduce_hook, "fp16_compress_hook", state, bucket)


# PyTorch's DDP refuses a function named `bf16_compress_hook` without CUDA and NCCL, though gloo sums bfloat16
# too now. So this function has another name, and the usual one below.
def bfloat16_compress_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average dense floating-point gradients over all ranks by one all-reduce in bfloat16.

    The result has the bucket's dtype. ``state`` is the process group; None for the default one.
    """
    return _run_in(torch.bfloat16, allreduce_hook, "bf16_compress_hook", state, bucket)


bf16_compress_hook = bfloat16_compress_hook


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook to work on float16 copies of the buckets; the result has the bucket's dtype."""
    return _wrapped(hook, torch.float16, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook to work on bfloat16 copies of the buckets; the result has the bucket's dtype."""
    return _wrapped(hook, torch.bfloat16, "bfloat16")


def _wrapped(hook: Hook, dtype: torch.dtype, dtype_name: str) -> Hook:
    name = f"{dtype_name}_{name_of(hook)}"

    def compressed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _run_in(dtype, hook, name, state, bucket)

    # DDP logs this name, and checks it as said above.
    compressed.__name__ = compressed.__qualname__ = name
    return compressed


def _run_in(dtype: torch.dtype, hook: Hook, name: str, state: object, bucket: GradBucket) -> TensorFuture:
    """Run a hook on a copy of a bucket in a dtype; the result goes into the bucket's buffer."""
    buffer = dense_buffer(bucket, name)
    bucket.set_buffer(buffer.to(dtype))

    def restore(landed: TensorFuture) -> torch.Tensor:
        record_use(buffer)
        bucket.set_buffer(buffer)  # for hooks around this one, which must not see the copy
        return buffer.copy_(landed.value())

    return hook(state, bucket).then(restore)
