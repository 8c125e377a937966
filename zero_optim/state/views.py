"""Attributes that other code expects of PyTorch's ``ZeroRedundancyOptimizer`` or of any optimizer.

Note [Steps that are none]
    `torch.distributed.checkpoint.state_dict` fills an empty ``state`` by a step with every rate and gradient
    zero. A rank that owns nothing would step alone, and wait for ever. Only the call stack tells this call
    from a real one; it is looked at on ranks without state, once DCP is imported. With DTensors, where all
    ranks call for a new optimizer, they do step, and the parameters' values are put back.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.dtensor.placement import local_rows
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import piece_of
from zero_optim.state.core import Core

_DCP = "torch.distributed.checkpoint.state_dict"
NOT_FOR_OURS = (
    "PyTorch's hook_with_zero_step and hook_with_zero_step_interleaved step PyTorch's "
    "ZeroRedundancyOptimizer alone: for this one import them from zero_optim.hooks, not from "
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
)


def is_no_step(core: Core) -> bool:
    """Whether ``step()`` is called to create state alone: Note [Steps that are none]."""
    if torch.compiler.is_compiling() or _DCP not in sys.modules or any(core.owned.local.states.all):
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _DCP


def begins_state(core: Core) -> bool:
    """Whether all ranks are to step once so that there is state: Note [Steps that are none]."""
    is_new = core.snapshot.untouched and not core.owned.local.states.initial(core.groups)
    if is_new and not core.inputs.held:
        core.snapshot.drop(is_new=True)
    return is_new and bool(core.inputs.held)


@contextmanager
def values_kept(core: Core) -> Iterator[None]:
    """Put the parameters' present values back after the body."""
    rows = list(map(local_rows, core.params))
    values = [each.clone() for each in rows]
    yield
    with torch.no_grad():
        for each, value in zip(rows, values, strict=True):
            each.copy_(value)


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """Several optimizers as one, read-only: groups in the user's order, state by the model's parameters."""

    optimizers: tuple[Optimizer, ...]
    param_groups: list[ParamGroup]
    state: Mapping[Any, Any]


class LocalView:
    """An optimizer over leaves, ``isinstance`` included, with state indexed by the model's parameters."""

    def __init__(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        vars(self).update(_optimizer=optimizer, state=state)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # noqa: ANN401 - the user's class
        """The class of the optimizer."""
        return type(vars(self)["_optimizer"])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_optimizer"], name, value)

    def __repr__(self) -> str:
        return repr(vars(self)["_optimizer"])


def local_view(core: Core) -> Optimizer | OptimizerView:
    """Return `ZeroRedundancyOptimizer.optim`."""
    core.owned.leaves.follow()
    optimizers, groups = core.owned.local.shown()
    if len(optimizers) > 1:
        return OptimizerView(optimizers, groups, core.state)
    is_by_param = not (core.owned.leaves.separate or core.owned.average.averages)
    return optimizers[0] if is_by_param else LocalView(optimizers[0], core.state)  # type: ignore[return-value]


def partition(core: Core) -> list[list[ParamGroup]]:
    """List for each rank the groups, with the parameters of which it owns rows."""

    def members(group: ParamGroup, rank: int) -> list[Tensor]:
        return [param for param in group["params"] if piece_of(core.sharding.pieces[param], rank) is not None]

    ranks = range(core.ranks.size)
    return [[{**group, "params": members(group, rank)} for group in core.groups] for rank in ranks]


def sync_options(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
    """Copy the options of groups to others."""
    for group, other in zip(source, target, strict=True):
        other.update(options_of(group))
