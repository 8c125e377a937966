"""The plain mean over all ranks."""

import torch
import torch.distributed as dist

from zero_optim.hooks.bucket import GradBucket
from zero_optim.hooks.exchange import group_of, start_average, start_sum


def allreduce_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, in its own dtype and in place. All ranks of the group call.

    One all-reduce of the bucket; sparse gradients too. The same arithmetic as PyTorch's hook of this name:
    every rank divides by the number of ranks, then all are summed.

    Args:
        state: the process group; None stands for the default one.
        bucket: the gradients, any dtype the backend can sum.
    """
    return start_average(group_of(state), bucket.buffer())


def mean_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the bits that DDP gives without a hook. All ranks of the group call.

    DDP multiplies by the inverse of the number of ranks where it copies a gradient into its bucket. On three
    ranks that rounds otherwise than a division, which is what `allreduce_hook` does. Gradients that are
    views of their bucket already are divided by DDP, and multiplied here: a hook cannot tell.

    Args:
        state: the process group; None stands for the default one.
        bucket: the gradients, any dtype the backend can sum.
    """
    group, buffer = group_of(state), bucket.buffer()
    if buffer.is_sparse:
        return start_average(group, buffer)
    return start_sum(group, buffer.mul_(1 / group.size()))
