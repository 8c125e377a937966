"""Hooks that send and sum gradients in 16 bits.

float16 has 10 bits of mantissa and overflows above 65504 (Micikevicius et al., *Mixed Precision Training*,
arXiv:1710.03740). bfloat16 has 7 and the range of float32 (Kalamkar et al., arXiv:1905.12322).
"""

import torch
import torch.distributed as dist

from zero_optim.compat.streams import record_use
from zero_optim.hooks.allreduce import group_of, start_average
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture, dense_buffer, name_of


def fp16_compress_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average dense floating-point gradients over all ranks by one all-reduce in float16.

    The result has the bucket's dtype. ``state`` is the process group; None for the default one.
    """
    return _average_as(torch.float16, state, bucket, "fp16_compress_hook")


# PyTorch's DDP refuses a function named `bf16_compress_hook` without CUDA and NCCL, though gloo sums bfloat16
# too now. So this function has another name, and the usual one below.
def bfloat16_compress_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average dense floating-point gradients over all ranks by one all-reduce in bfloat16.

    The result has the bucket's dtype. ``state`` is the process group; None for the default one.
    """
    return _average_as(torch.bfloat16, state, bucket, "bf16_compress_hook")


bf16_compress_hook = bfloat16_compress_hook


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook to work on float16 copies of the buckets; the result has the bucket's dtype."""
    return _wrapped(hook, torch.float16, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook to work on bfloat16 copies of the buckets; the result has the bucket's dtype."""
    return _wrapped(hook, torch.bfloat16, "bfloat16")


def _average_as(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: GradBucket, name: str
) -> TensorFuture:
    buffer = dense_buffer(bucket, name)

    def restore(landed: TensorFuture) -> torch.Tensor:
        record_use(buffer)
        return buffer.copy_(landed.value())

    return start_average(group_of(process_group), buffer.to(dtype)).then(restore)


def _wrapped(hook: Hook, dtype: torch.dtype, dtype_name: str) -> Hook:
    name = f"{dtype_name}_{name_of(hook)}"

    def compressed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = dense_buffer(bucket, name)
        bucket.set_buffer(buffer.to(dtype))

        def restore(landed: TensorFuture) -> torch.Tensor:
            record_use(buffer)
            bucket.set_buffer(buffer)  # for hooks around this one, which must not see the copy
            return buffer.copy_(landed.value())

        return hook(state, bucket).then(restore)

    # DDP logs this name, and checks it as said above.
    compressed.__name__ = compressed.__qualname__ = name
    return compressed
