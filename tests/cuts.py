"""For the tests of cut parameters: a planner that cuts all it can, however small."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from training import twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.plan import cuts as plan_of_cuts
from zero_optim.plan.plan import Plan, make_plan
from zero_optim.shard import sharding

ALIGNMENT = 64  # bytes
SHAPES = ((32, 8), (7,), (16, 4, 3, 3), (), (64, 16), (0, 3), (1,), (96,))
ONE_A_BUCKET = 1e-6  # capacity in MiB: each parameter has a bucket of its own, and is cut over all ranks


@contextmanager
def cutting() -> Iterator[None]:
    """Have optimizers made inside cut what can be cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_plan", plan_cuts)
        yield


@contextmanager
def finely_cut() -> Iterator[None]:
    """Have plans cut what their class bears, however small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_of_cuts, "MIN_ROW_NBYTES", ALIGNMENT)
        patch.setattr(plan_of_cuts, "MIN_TURNS", 2**30)
        yield


def cut_over(
    params: Any, optimizer_class: Any = torch.optim.AdamW, *, cap: float = ONE_A_BUCKET, **options: Any
) -> ZeroRedundancyOptimizer:
    """An optimizer that cuts what can be cut of its parameters."""
    with cutting():
        made = ZeroRedundancyOptimizer(params, optimizer_class, bucket_cap_mb=cap, **options)
    assert dist.get_world_size() == 1 or any(len(pieces) > 1 for pieces in made.pieces().values())
    return made


def cut_pair(
    params: list[nn.Parameter],
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    *,
    cap: float = ONE_A_BUCKET,
    options: dict[str, Any] | None = None,
    **sharded_options: Any,
) -> tuple[Optimizer, ZeroRedundancyOptimizer]:
    """An unsharded optimizer over parameters, and one over equal ones that are cut."""
    options = {"lr": 0.01} if options is None else options
    sharded = cut_over(twin(params), optimizer_class, cap=cap, **sharded_options, **options)
    return optimizer_class(params, **options), sharded


def sparse_gradient(param: Tensor, step: int) -> Tensor:
    """Some rows of a gradient, one of them twice; few lie on the first rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(param.shape[0], (7,), generator=generator)
    rows[3] = rows[1]
    return torch.sparse_coo_tensor(
        rows[None], torch.randn(7, *param.shape[1:], generator=generator), param.shape, check_invariants=True
    )


def plan_cuts(
    groups: Sequence[Sequence[Tensor]],
    costs: Sequence[Sequence[float]],
    loads: Sequence[float],
    cap_nbytes: int,
    _: Sequence[bool] | None = None,
    *more: Any,
) -> Plan:
    """As the planner, but all parameters may be cut, and every bucket gets rows as equal as may be."""
    may_be_cut = [True] * sum(map(len, groups))
    with finely_cut(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_of_cuts, "TOLERANCE", 0.0)
        return make_plan(groups, costs, loads, cap_nbytes, may_be_cut, *more)
