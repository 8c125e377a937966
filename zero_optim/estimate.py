"""The bytes that a rank needs to train a model, before a parameter or a process group exists.

Note [What is counted]
    Buckets and rows are those of `make_plan`; state is what the class makes on the meta device. At rest there
    are parameters, state, and the buckets of DDP. The peak is at the end of the backward pass, with buckets
    on their way to owners, or in the step, with what the class computes meanwhile. Stage 3 has whole units
    beside: the one that runs, those around it, and the next. Neither activations nor module buffers are
    counted. In tests the peak is within 5 % of what is measured.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_optim.comm.backends import transport_of
from zero_optim.ddp.full.choice import UnitChoice, Units, choose_units
from zero_optim.plan.costs import numel_cost
from zero_optim.plan.plan import Plan, make_plan
from zero_optim.plan.strides import STRIDES_WHEN_WHOLE, dense_strides
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.probe import probe
from zero_optim.probe.step_bytes import StepBytes
from zero_optim.probe.subject import under_test
from zero_optim.probe.traits import refusal
from zero_optim.step.leaves import stepped_dtype


@dataclass(slots=True)
class RankBytes:
    """Bytes of one rank: Note [What is counted]."""

    parameters: int = 0
    state: int = 0  # of the optimizer, with masters
    ddp_buckets: int = 0
    gradients: int = 0  # when a backward pass ends, apart from buckets
    moving: int = 0  # in the backward pass: buckets on their way, whole units, or the newest gradient
    step: int = 0  # what the step takes meanwhile

    @property
    def rest(self) -> int:
        """Between steps, without gradients."""
        return self.parameters + self.state + self.ddp_buckets

    @property
    def peak(self) -> int:
        """At most in a step, without activations."""
        return self.rest + self.gradients + max(self.moving, self.step)


def estimate(  # noqa: PLR0913 - keyword-only
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
    num_ranks: int = 8,
    stage: int = 1,
    *,
    units: Units = "auto",
    device: str = "cpu",
    bucket_cap_mb: float = 32.0,
    master_dtype: torch.dtype | None = None,
    gradient_as_bucket_view: bool = False,
    **defaults: object,
) -> list[RankBytes]:
    """Compute the bytes of each rank. No process group, no communication, no memory for the model.

    Args:
        model: on any device; build a large one under ``torch.device("meta")``.
        optimizer_class: as for `ZeroRedundancyOptimizer`; it is tried.
        num_ranks: that share the state.
        stage: 0 is DDP and an optimizer that is not sharded, 1 `ZeroRedundancyOptimizer` with DDP, 2
            `ShardedDataParallel`, 3 `FullyShardedDataParallel`.
        units: as for `FullyShardedDataParallel`.
        device: "cpu", or "cuda" for an accelerator, where torch.optim steps all parameters at once.
        bucket_cap_mb: as for `ZeroRedundancyOptimizer`.
        master_dtype: likewise.
        gradient_as_bucket_view: as for DDP, whose buckets else hold each gradient a second time.
        **defaults: keyword arguments of ``optimizer_class``.

    Raises:
        ValueError: a stage or number of ranks that there is not, or a class that cannot be sharded.
    """
    if stage not in (0, 1, 2, 3) or num_ranks < 1:
        raise ValueError(f"expected a stage of (0, 1, 2, 3) and at least 1 rank, got {stage} and {num_ranks}")
    subject, size = under_test(optimizer_class, defaults), num_ranks if stage else 1
    if not (traits := probe(subject)).separable:
        raise ValueError(refusal(optimizer_class, traits))
    params = [_like(param, device) for param in model.parameters()]
    choice = choose_units(model, units) if stage == 3 else None
    numbers = [None if choice is None else choice.unit_of[param] for param in model.parameters()]
    stepped = [stepped_dtype(param.dtype, master_dtype) for param in params]
    tried = stepped if device == "cpu" else [torch.float32] * len(params)
    reasons = {kind: why_not_cut(subject, kind) for kind in {*tried}}
    plan = _plan(params, numbers, size, bucket_cap_mb, [reasons[kind] is None for kind in tried], device)
    ranks = [RankBytes() for _ in range(size)]
    _add_rows(ranks, params, plan, are_whole=stage < 3)
    _add_state(ranks, params, stepped, plan, StepBytes(optimizer_class, defaults, device))
    trained = [param.nbytes for param in params if param.requires_grad]
    moving, views = max(trained, default=0), gradient_as_bucket_view
    if stage == 2:
        full = max(sum(params[i].nbytes for i in b.params if params[i].requires_grad) for b in plan.buckets)
        moving += (2 if device == "cpu" else 3) * full
    elif choice is not None and size > 1:
        moving = _whole_units(choice)
    for of in ranks:
        of.moving = moving if stage > 1 or views else 0
        if stage < 2:
            of.ddp_buckets, of.gradients = sum(trained), 0 if views else sum(trained)
    return ranks * (num_ranks // size)


def _like(param: Tensor, device: str) -> Parameter:
    """Make a parameter without memory; on the CPU it has the attribute of a freed one."""
    strides, trains = dense_strides(param), param.requires_grad
    if device != "cpu":
        return Parameter(torch.empty_strided(param.shape, strides, dtype=param.dtype, device="meta"), trains)
    like = Parameter(torch.zeros((), dtype=param.dtype).expand(param.shape), trains)
    setattr(like, STRIDES_WHEN_WHOLE, strides)
    return like


def _plan(
    params: list[Parameter], units: list[int | None], size: int, cap_mb: float, cuts: list[bool], device: str
) -> Plan:
    """Plan as ranks do that agree; a plan's very rows are not tried, which takes long."""
    costs, cap_nbytes = list(map(numel_cost, params)), max(1, int(cap_mb * 2**20))
    row_nbytes = transport_of("gloo" if device == "cpu" else "nccl", torch.device(device)).row_nbytes
    plan_with = partial(make_plan, [params], [costs], [0.0] * size, cap_nbytes, row_nbytes=row_nbytes)
    plan = plan_with([True] * len(params), units)
    return plan_with(cuts, units) if plan.is_cut else plan


def _add_rows(ranks: list[RankBytes], params: list[Parameter], plan: Plan, *, are_whole: bool) -> None:
    for bucket in plan.buckets:
        itemsize = params[bucket.params[0]].itemsize
        for row in () if are_whole else bucket.layout.rows:
            ranks[row.owner].parameters += (row.stop - row.start) * itemsize
        for of in ranks if are_whole else ():
            of.parameters += bucket.layout.numel * itemsize


def _add_state(
    ranks: list[RankBytes], params: list[Parameter], stepped: list[torch.dtype], plan: Plan, trial: StepBytes
) -> None:
    for param, dtype, pieces in zip(params, stepped, plan.pieces, strict=True):
        for owner, start, stop in pieces:
            shape = (stop - start, *param.shape[1:]) if len(pieces) > 1 else tuple(param.shape)
            of, numel = ranks[owner], math.prod(shape)
            masters = numel * dtype.itemsize if dtype != param.dtype else 0
            of.state += masters
            if param.requires_grad:
                state, step = trial.bytes_of(shape, dtype)
                of.state, of.gradients = of.state + state, of.gradients + numel * param.itemsize
                of.step = (of.step + step if trial.at_once else max(of.step, step)) + masters  # and gradients


def _whole_units(choice: UnitChoice) -> int:
    """Return the bytes of the most units that are whole, and of their gradients on the way to owners."""
    names, nbytes, sent = choice.names, [0] * len(choice.names), [0] * len(choice.names)
    for param, number in choice.unit_of.items():
        nbytes[number] += param.nbytes
        sent[number] += param.nbytes if param.requires_grad else 0

    most = 0
    for number, name in enumerate(names):
        around = [i for i in range(number) if name.startswith(names[i] and f"{names[i]}.")]
        whole = [number, *range(number + 1, len(names))[:1], *around]
        most = max(most, sum(nbytes[i] for i in whole) + sum(sent[i] for i in (number, number, *around)))
    return most + max(sent)  # what is received
