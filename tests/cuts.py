"""For the tests of cut parameters: a planner that cuts all it can, however small."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from training import twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.plan import cuts as plan_of_cuts
from zero_optim.plan.layout import Extent, Layout, Row
from zero_optim.plan.partition import assign_buckets
from zero_optim.plan.pieces import Piece, num_rows
from zero_optim.plan.plan import BucketPlan, Plan
from zero_optim.plan.strides import dense_strides
from zero_optim.shard import sharding

ALIGNMENT = 64  # bytes
SHAPES = ((32, 8), (7,), (16, 4, 3, 3), (), (64, 16), (0, 3), (1,), (96,))
ONE_A_BUCKET = 1e-5  # capacity in MiB: each parameter has a bucket of its own, and is cut over all ranks


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


def sparse_gradient(param: Tensor, step: int, *, coalesced: bool) -> Tensor:
    """Some rows of a gradient, one of them twice unless it is coalesced; few lie on the first rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(param.shape[0], (7,), generator=generator)
    rows[3] = rows[1]
    grad = torch.sparse_coo_tensor(
        rows[None], torch.randn(7, *param.shape[1:], generator=generator), param.shape, check_invariants=True
    )
    return grad.coalesce() if coalesced else grad


def plan_cuts(
    groups: Sequence[Sequence[Tensor]],
    costs: Sequence[Sequence[float]],
    num_ranks: int,
    cap_nbytes: int,
    loads: Sequence[float] | None = None,
    *_: object,
) -> Plan:
    """As `zero_optim.plan.plan.make_plan`, but every bucket is cut in rows that are as equal as may be."""
    params = list(chain.from_iterable(groups))
    keys = [(p.dtype, p.device, p.requires_grad) for p in params]
    buckets = assign_buckets(keys, [p.numel() * p.element_size() for p in params], cap_nbytes)
    pieces: dict[int, tuple[Piece, ...]] = {}
    plans = []
    for bucket in buckets:
        layout, found = _lay_out([params[index] for index in bucket], num_ranks)
        plans.append(BucketPlan(tuple(bucket), layout))
        pieces.update(zip(bucket, found, strict=True))
    ordered = tuple(pieces[index] for index in range(len(params)))
    return Plan(tuple(chain.from_iterable(costs)), ordered, tuple(plans))


def _lay_out(params: Sequence[Tensor], num_ranks: int) -> tuple[Layout, list[tuple[Piece, ...]]]:
    alignment = ALIGNMENT // params[0].element_size()
    numel = sum(-(-p.numel() // alignment) * alignment for p in params)
    rows: list[list[Extent]] = [[] for _ in range(num_ranks)]
    ends = [0] * num_ranks
    pieces, at = [], 0
    for index, param in enumerate(params):
        owned, size = [], num_rows(param.shape)
        in_row = param.numel() // max(1, size)
        cuttable = param.dim() and dense_strides(param)[0] == in_row
        begin = 0
        for rank in range(num_ranks):
            target = numel * (rank + 1) // num_ranks if rank < num_ranks - 1 else numel
            stop = size
            if target < at + param.numel():
                edges = (
                    [row for row in range(size) if (at + row * in_row) % alignment == 0] if cuttable else [0]
                )
                stop = max(row for row in edges if at + row * in_row <= target or row == 0)
            if stop > begin or (size == 0 and stop == size and not owned):
                owned.append(Piece(rank, begin, stop))
                rows[rank].append(Extent(index, begin * in_row, stop * in_row, at + begin * in_row))
                ends[rank] = rows[rank][-1].end
                begin = stop
            if begin == size:
                break
        pieces.append(tuple(owned))
        at += -(-param.numel() // alignment) * alignment
        last = owned[-1].owner
        ends[last] = at
    starts, made = 0, []
    for rank in range(num_ranks):
        if rows[rank]:
            made.append(Row(rank, starts, ends[rank], tuple(rows[rank])))
            starts = ends[rank]
    return Layout(tuple(p.numel() for p in params), tuple(made)), pieces
