"""Hooks that average gradients over all ranks, uncompressed."""

import torch
import torch.distributed as dist

from zero_optim.hooks.bucket import GradBucket
from zero_optim.hooks.exchange import group_of, start_average, start_sum


def allreduce_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, in its own dtype and in place: one all-reduce, also if sparse.

    As in PyTorch's hook of this name, every rank divides by the number of ranks, then the sum is taken.

    Args:
        state: the process group; None stands for the default one.
        bucket: the gradients, of any dtype that the backend can sum.
    """
    return start_average(group_of(state), bucket.buffer())


def mean_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the bits of DDP without a hook, which multiplies by 1 / number of ranks.

    DDP divides gradients that are views of their bucket; this hook cannot see them and multiplies.
    """
    group, buffer = group_of(state), bucket.buffer()
    if buffer.is_sparse:
        return start_average(group, buffer)
    return start_sum(group, buffer.mul_(1 / group.size()))
