"""The plain mean over all ranks: what DDP does without a hook."""

import torch
import torch.distributed as dist

from zero_optim.hooks.bucket import GradBucket
from zero_optim.hooks.exchange import group_of, launch_average


def allreduce_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, in its own dtype and in place. All ranks of the group call.

    One all-reduce of the bucket; sparse gradients too. The same arithmetic as PyTorch's hook of this name:
    every rank divides by the number of ranks, then all are summed.

    Args:
        state: the process group; None stands for the default one.
        bucket: the gradients, any dtype the backend can sum.
    """
    return launch_average(group_of(state), bucket.buffer())
