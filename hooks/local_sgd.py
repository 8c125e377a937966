"""Post-local SGD: gradients averaged by all ranks at first, parameters averaged now and then afterwards.

Lin, Stich, Patel and Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020 (arXiv:1808.07217). Two
parts: the hook stops averaging gradients over all ranks after some iterations, and from then on the averager,
called after each step of the optimizer, averages the parameters every few steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers

from zero_optim.compat.engine import copy_each
from zero_optim.hooks.bucket import GradBucket
from zero_optim.hooks.exchange import group_of, landed, start_average


@dataclass(slots=True, eq=False)
class PostLocalSGDState:
    """Options of `post_localSGD_hook`; one a model, on every rank. Making it does not communicate.

    Args:
        process_group: the ranks that average at first; None stands for the default group.
        subgroup: the ranks that go on averaging gradients afterwards, usually those of one machine:
            ``torch.distributed.new_subgroups(group_size)`` makes such groups.
        start_localSGD_iter: iterations averaged over all ranks, from 0 on.
        post_local_gradient_allreduce: whether the subgroup goes on averaging gradients at all.

    Attributes:
        iteration: number of iterations whose last bucket has come.

    Raises:
        ValueError: an option out of range, or no subgroup to average in.
    """

    process_group: dist.ProcessGroup | None
    subgroup: dist.ProcessGroup | None
    start_localSGD_iter: int
    post_local_gradient_allreduce: bool = True
    _: KW_ONLY
    iteration: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.start_localSGD_iter < 0:
            raise ValueError(f"expected a start_localSGD_iter of at least 0, got {self.start_localSGD_iter}")
        if self.subgroup is None and self.post_local_gradient_allreduce:
            raise ValueError(
                "expected a subgroup, got None: pass torch.distributed.new_subgroups(group_size)[0], or "
                "post_local_gradient_allreduce=False for no averaging of gradients after the start"
            )

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs, the number of iterations. Does not communicate."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Does not communicate."""
        self.iteration = state_dict["iteration"]


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks until local SGD starts, then in the subgroup or not at all.

    One all-reduce at most. All ranks of the group call. From the start on, a `PeriodicModelAverager` has to
    average the parameters, or the replicas drift apart for good.

    Args:
        state: options.
        bucket: the gradients, any dtype the backend can sum.
    """
    iteration, state.iteration = state.iteration, state.iteration + bucket.is_last()
    if iteration < state.start_localSGD_iter:
        return start_average(group_of(state.process_group), bucket.buffer())
    if state.subgroup is None or not state.post_local_gradient_allreduce:
        return landed(bucket.buffer())
    return start_average(state.subgroup, bucket.buffer())


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """PyTorch's averager with another way of averaging: call it after each step of the optimizer.

    Constructor, schedule and ``step`` are PyTorch's, so that its ``PostLocalSGDOptimizer`` takes this one as
    well. But PyTorch's gives parameters new memory, which undoes views that others hold, such as the buckets
    of `ZeroRedundancyOptimizer`; and leaves out parameters that have no gradient on this rank, which other
    ranks may average. This one averages in place, all parameters that it is given, each dtype on its own.

    Args:
        period: steps from one averaging to the next.
        warmup_steps: steps before the first one; the ``start_localSGD_iter`` of the hook.
        process_group: the ranks that average; None stands for the default group.
    """

    @torch.no_grad()
    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average if it is time to. All ranks call, with the same parameters.

        One all-reduce for each dtype and device, waited for.

        Args:
            params: parameters, or the groups of an optimizer.
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            for alike in _by_kind(params):
                flat = torch.cat([param.reshape(-1) for param in alike])
                start_average(self.process_group, flat).wait()
                copy_each(alike, [
                    part.view(param.shape)
                    for part, param in zip(torch.split(flat, [p.numel() for p in alike]), alike, strict=True)
                ])  # fmt: skip
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs, the number of steps. Does not communicate."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Does not communicate."""
        self.step = state_dict["step"]


def _by_kind(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[list[Tensor]]:
    """Sort parameters by dtype and device, in the order in which they are met."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for item in params:
        for param in item["params"] if isinstance(item, dict) else [item]:
            kinds.setdefault((param.dtype, param.device), []).append(param.detach())
    return list(kinds.values())
