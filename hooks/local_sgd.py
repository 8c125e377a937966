"""Post-local SGD: at first all ranks average gradients; later they average parameters every few steps.

Lin, Stich, Patel and Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020 (arXiv:1808.07217).
There are two parts. After some iterations the hook stops averaging gradients over all ranks. From then on the
averager, which the user calls after each step of the optimizer, averages the parameters every few steps.
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
    """Options of `post_localSGD_hook`; one object for each model and rank. Making it does not communicate.

    Args:
        process_group: the ranks that average at first; None stands for the default group.
        subgroup: the ranks that average gradients later, usually those of one machine:
            ``torch.distributed.new_subgroups(group_size)`` makes such groups.
        start_localSGD_iter: number of iterations that are averaged over all ranks, 0 or more.
        post_local_gradient_allreduce: whether the subgroup averages gradients later at all.

    Attributes:
        iteration: number of iterations whose last bucket the hook has seen.

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
        """Return what a checkpoint needs: the number of iterations. Does not communicate."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Does not communicate."""
        self.iteration = state_dict["iteration"]


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks until local SGD starts, then in the subgroup or not at all.

    At most one all-reduce. All ranks of the group call. Once local SGD has started, a `PeriodicModelAverager`
    has to average the parameters, or the replicas drift apart for good.

    Args:
        state: options.
        bucket: the gradients, of any dtype that the backend can sum.
    """
    iteration, state.iteration = state.iteration, state.iteration + bucket.is_last()
    if iteration < state.start_localSGD_iter:
        return start_average(group_of(state.process_group), bucket.buffer())
    if state.subgroup is None or not state.post_local_gradient_allreduce:
        return landed(bucket.buffer())
    return start_average(state.subgroup, bucket.buffer())


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """PyTorch's averager with another way of averaging: call it after each step of the optimizer.

    Constructor, schedule and ``step`` are PyTorch's, so its ``PostLocalSGDOptimizer`` accepts this class.
    PyTorch's averager gives parameters new memory. That breaks views, such as those into the buckets of
    `ZeroRedundancyOptimizer`. It also leaves out parameters without a gradient on this rank, which other
    ranks may average. This one averages all given parameters in place, each dtype separately.

    Args:
        period: steps from one averaging to the next.
        warmup_steps: steps before the first one; the ``start_localSGD_iter`` of the hook.
        process_group: the ranks that average; None stands for the default group.
    """

    @torch.no_grad()
    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average if the schedule says so. All ranks call, with the same parameters.

        Makes one all-reduce for each dtype and device, and waits for it.

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
        """Return what a checkpoint needs: the number of steps. Does not communicate."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Does not communicate."""
        self.step = state_dict["step"]


def _by_kind(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[list[Tensor]]:
    """Group parameters by dtype and device, in the given order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for item in params:
        for param in item["params"] if isinstance(item, dict) else [item]:
            kinds.setdefault((param.dtype, param.device), []).append(param.detach())
    return list(kinds.values())
