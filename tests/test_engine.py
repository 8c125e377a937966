"""Every recipe is run from its row of the table, in every wrapper, and nothing else moves buckets."""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel, unsharded
from zero_optim.flow.schedule import (
    HELD_ROWS,
    HELD_WHOLE,
    LAZY,
    OVERLAP,
    ZERO1,
    ZERO2,
    ZERO3,
    Moment,
    Operation,
    Schedule,
)
from zero_optim.hooks import zero_step
from zero_optim.shard.engine import Engine
from zero_optim.shard.gathers import start_gather
from zero_optim.step.owned import OwnedState

CAP_MB = 0.004  # several buckets
RUNS = {inspect.unwrap(getattr(Engine, f"_{each.value}")).__code__: each for each in Operation}
# What moves bytes, and the operation in which alone it may.
MOVES = {
    inspect.unwrap(function).__code__: operation
    for function, operation in ((start_gather, Operation.GATHER), (OwnedState.step, Operation.STEP))
}
Entries = set[tuple[Moment, Operation]]


class Seen:
    """The entries that `Engine.on` ran by a row, and what ran without it."""

    def __init__(self) -> None:
        self.entries: Entries = set()
        self.beside: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        operation, needed = RUNS.get(frame.f_code), MOVES.get(frame.f_code)
        if event != "call" or (operation is None and needed is None):
            return
        by = frame.f_back
        while by is not None and "/torch/_" in by.f_code.co_filename:
            by = by.f_back
        if operation is not None and by is not None and by.f_code is Engine.on.__code__:
            self.entries.add((by.f_locals["moment"], operation))
        elif operation is not None or not self._is_inside(frame, needed):
            self.beside.append(frame.f_code.co_qualname)

    def _is_inside(self, frame: FrameType | None, operation: Operation | None) -> bool:
        while frame is not None and RUNS.get(frame.f_code) is not operation:
            frame = frame.f_back
        return frame is not None


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Look at each call of a Python function, on all threads."""
    for module in (threading, sys):
        module.setprofile(seen)
    try:
        yield
    finally:
        for module in (threading, sys):
            module.setprofile(None)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)]
    return nn.Sequential(*layers)


def trained(
    wrap: Any, schedule: Schedule | None = None, hook: Any = None, **options: Any
) -> tuple[list[Tensor], Seen]:
    """Train four steps; return the weights, and what was seen in the last two."""
    model, seen = new_model(), Seen()
    beside = [] if hook is None else [nn.Parameter(torch.ones(5))]  # which only step() steps
    if options.pop("lazily", False):
        options["gather_lazily"] = model
    params = [*model.parameters(), *beside]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1, bucket_cap_mb=CAP_MB, **options)
    wrapped = wrap(model, optimizer)
    if hook is not None:
        wrapped.register_comm_hook(None, hook(optimizer))
    if schedule is not None:
        optimizer.core.engine.run_by(schedule)
    for number in range(4):
        with watching(seen if number > 1 else Seen()):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            for param in beside:
                param.grad = torch.full_like(param, 0.5 + number)
            wrapped(x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_gathers()
    if isinstance(wrapped, FullyShardedDataParallel):
        with unsharded(wrapped, writes=False):
            return [param.detach().clone() for param in params], seen
    return [param.detach().clone() for param in params], seen


def entries_of(schedule: Schedule) -> Entries:
    return {(moment, each) for moment, row in schedule.moments.items() for each in row}


def in_ddp(model: nn.Module, _: object, kind: type[nn.Module] = DistributedDataParallel) -> nn.Module:
    return kind(model, bucket_cap_mb=CAP_MB)


in_torch = partial(in_ddp, kind=TorchDdp)
by_units = partial(FullyShardedDataParallel, units=nn.Linear)
CASES: dict[str, tuple[Any, Schedule, dict[str, Any]]] = {
    "ZeRO-1": (in_ddp, ZERO1, {}),
    "ZeRO-1, PyTorch's DDP": (in_torch, ZERO1, {}),
    "gather_lazily": (in_ddp, LAZY, {"lazily": True}),
    "gather_lazily, PyTorch's DDP": (in_torch, LAZY, {"lazily": True}),
    "zero_step": (in_ddp, OVERLAP, {"hook": zero_step}),
    "zero_step, PyTorch's DDP": (in_torch, OVERLAP, {"hook": zero_step}),
    "ZeRO-2": (ShardedDataParallel, ZERO2, {}),
    "ZeRO-2, lazily": (ShardedDataParallel, ZERO2.lazily(), {"lazily": True}),
    "ZeRO-3": (by_units, ZERO3, {}),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_each_entry_of_a_row_is_run_from_the_row_and_nothing_else_moves_buckets(name: str) -> None:
    wrap, schedule, options = CASES[name]
    expected = entries_of(schedule)
    if "PyTorch's DDP" in name:  # which reduces its own buckets
        expected.discard((Moment.BUCKET_FULL, Operation.REDUCE))
    _, seen = trained(wrap, **options)
    assert not seen.beside, seen.beside
    assert seen.entries == expected


@on_ranks(2)
@pytest.mark.parametrize(
    ("schedule", "optimizer_class"),
    [(HELD_ROWS, torch.optim.AdamW), (HELD_WHOLE, torch.optim.Adafactor)],
    ids=["FSDP2, rows", "FSDP2, whole"],
)
def test_each_entry_of_a_row_of_fsdp2_is_run_from_the_row(schedule: Schedule, optimizer_class: Any) -> None:
    model, seen = fully_shard(new_model()), Seen()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class)
    for _ in range(2):
        with watching(seen):
            model(torch.ones(3, 16)).square().mean().backward()
            optimizer.step()
    assert not seen.beside, seen.beside
    assert seen.entries == entries_of(schedule)


@on_ranks(2)
@pytest.mark.parametrize(
    "moments",
    [
        {
            Moment.BUCKET_REDUCED: (Operation.STEP, Operation.GATHER, Operation.WAIT),
            Moment.AFTER_BACKWARD: (),
        },
        {Moment.BUCKET_REDUCED: (Operation.STEP,), Moment.AFTER_BACKWARD: (Operation.GATHER, Operation.WAIT)},
    ],
    ids=["each bucket waits for its gather", "the end of the pass gathers"],
)
def test_a_new_recipe_is_one_row(moments: dict[Moment, tuple[Operation, ...]]) -> None:
    recipe = Schedule({**OVERLAP.moments, **moments})
    expected, _ = trained(in_ddp, hook=zero_step)
    params, seen = trained(in_ddp, recipe, zero_step)
    assert not seen.beside, seen.beside
    assert seen.entries == entries_of(recipe)
    assert all(map(torch.equal, params, expected))
