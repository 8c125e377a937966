"""Buckets of gradients: PyTorch's ``GradBucket``, our DDP's with the same methods; and their mean."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket as _GradBucket  # type: ignore[attr-defined] # its stub exports nothing

from zero_optim.comm.collectives import RankGroup
from zero_optim.flow.pending import Pending
from zero_optim.plan.strides import consecutive_views

GradBucket: TypeAlias = _GradBucket
TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]
Hook: TypeAlias = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def gradients_in(reduced: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View each parameter's gradient, with its strides, in a dense reduced bucket of any dtype."""
    flat, dtype = reduced.reshape(-1), params[0].dtype
    if dtype.is_complex and not flat.is_complex():  # PyTorch's DDP has real numbers in the bucket
        flat = torch.view_as_complex(flat.to(dtype.to_real()).view(-1, 2))
    return consecutive_views(flat.to(dtype), params)


def name_of(hook: Hook) -> str:
    """Return the name of a hook function or object."""
    return getattr(hook, "__name__", type(hook).__name__)


def group_of(state: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that a hook's state is, the default one for None; ValueError without any."""
    group = dist.group.WORLD if state is None else state
    if group is None:
        raise ValueError(
            "expected a process group, got none: call torch.distributed.init_process_group() first"
        )
    return group


def start_mean(ranks: RankGroup, bucket: GradBucket) -> Pending[Tensor]:
    """Start to average a bucket as DDP without a hook: times 1 / ranks. DDP divides views of a bucket."""
    buffer = bucket.buffer()
    if not getattr(bucket, "is_divided", False):
        buffer = buffer.div_(ranks.size) if buffer.is_sparse else buffer.mul_(1 / ranks.size)
    return ranks.start_sum(buffer, f"bucket {bucket.index()}")
