"""Fully sharded models are saved by the owners of their rows, and load at any stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fully import Tower, adamw, assert_equal, state_of, train
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint.offline import consolidate
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    full_state_dict,
    unsharded,
)

Wrap = Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module]
STAGES: dict[str, Wrap] = {
    "plain": lambda model, _: DistributedDataParallel(model),
    "gradients": ShardedDataParallel,
    "fully": FullyShardedDataParallel,
}


class Convolved(Tower):
    """With a parameter whose strides are not those of its shape, a tied one, a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.zeros(3))
        self.last = nn.Linear(24, 3, bias=False)
        self.again = nn.Linear(24, 3)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.reshape(-1, 2, 2, 2)).reshape(-1, 16)[:, :8] + x
        self.count.add_(1)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.again(x)

    def get_extra_state(self) -> str:
        return "extra"

    def set_extra_state(self, state: object) -> None:
        assert state == "extra"


def built(stage: str, model: nn.Module | None = None, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = Convolved() if model is None else model
    optimizer = adamw(model, **options)
    return STAGES[stage](model, optimizer), optimizer


def saved(folder: Path, stage: str) -> dict[str, Any]:
    """Train, save without a gather, and give the state dict."""
    model, optimizer = built(stage)
    train(model, optimizer, 2)
    gathers = optimizer.metrics(reset=False)["collectives/gather"]
    checkpoint.save(folder, model=model, optimizer=optimizer)
    assert optimizer.metrics(reset=False)["collectives/gather"] == gathers
    if stage == "fully":
        assert model.units.nbytes_live() == 0
    return state_of(model)


def loaded(folder: Path, stage: str) -> tuple[dict[str, Any], list[float]]:
    """Load, and give the state dict and the losses of what follows."""
    model, optimizer = built(stage)
    train(model, optimizer, range(5, 6))
    checkpoint.load(folder, model=model, optimizer=optimizer)
    return state_of(model), train(model, optimizer, range(2, 4))


@on_ranks(2)
def test_a_checkpoint_loads_at_another_stage(tmp_path: Path) -> None:
    """Files are those of whole parameters."""
    want = saved(tmp_path / "plain", "plain")
    _, losses = loaded(tmp_path / "plain", "plain")
    for stage in ("gradients", "fully"):
        assert_equal(saved(tmp_path / stage, stage), want)
    for folder, stage in (("fully", "plain"), ("fully", "fully"), ("gradients", "fully")):
        state, went_on = loaded(tmp_path / folder, stage)
        assert_equal(state, want)
        assert went_on == losses
    if torch.distributed.get_rank() == 0:
        weights = []
        for stage in ("plain", "fully"):
            consolidate(tmp_path / stage, tmp_path / f"{stage}.pt", weights=True)
            weights.append(torch.load(tmp_path / f"{stage}.pt", weights_only=False))
        assert_equal(*weights)
        strides = [
            {name: value.stride() for name, value in each.items() if isinstance(value, Tensor)}
            for each in weights
        ]
        assert strides[0] == strides[1]


@on_ranks(2)
def test_the_whole_state_dict_comes_to_one_rank_unit_by_unit() -> None:
    model, optimizer = built("fully")
    train(model, optimizer, 2)
    want = state_of(model)
    sizes = [sum(bucket.nbytes for bucket in unit.buckets) for unit in model.units.units]
    live: list[int] = []
    for unit in model.units.units:
        take, bucket = unit.buckets[0].settle, unit.buckets[0]

        def look(flat: Tensor, changed: Any = None, take: Any = take) -> None:
            take(flat, changed)
            live.append(model.units.nbytes_live())

        bucket.settle = look
    state = full_state_dict(model, ranks=[1])
    assert live
    assert max(live) <= max(sizes)
    if torch.distributed.get_rank() == 1:
        assert state is not None
        assert_equal(state, want)
        assert state["last.weight"] is state["again.weight"]
    else:
        assert state is None
    with pytest.raises(ValueError, match="expected ranks from 0 to 1"):
        full_state_dict(model, ranks=[2])


@on_ranks(2)
def test_what_would_miss_parameters_is_refused() -> None:
    model, optimizer = built("fully")
    with pytest.raises(ValueError, match="give the optimizer too"):
        checkpoint.save("nowhere", model=model)
    with unsharded(model):
        for call in (
            lambda: checkpoint.save("nowhere", model=model, optimizer=optimizer),
            optimizer.step,
        ):
            with pytest.raises(RuntimeError, match="are whole for somebody to read"):
                call()
    train(model, optimizer, 1)
