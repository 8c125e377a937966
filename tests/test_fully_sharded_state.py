"""Fully sharded models are saved by the owners of their rows, and load at any stage and number of ranks."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_optim.checkpoint
from pool import Ranks, on_ranks
from test_fully_sharded import Tower, batch
from zero_optim import ZeroRedundancyOptimizer
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def built(stage: str, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = Convolved()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    return STAGES[stage](model, optimizer), optimizer


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saves(folder: str, stage: str) -> dict[str, torch.Tensor]:
    model, optimizer = built(stage)
    train(model, optimizer, range(2))
    gathers = optimizer.metrics(reset=False)["collectives/gather"]
    zero_optim.checkpoint.save(f"{folder}/{stage}", model=model, optimizer=optimizer)
    assert optimizer.metrics(reset=False)["collectives/gather"] == gathers
    if stage == "fully":
        assert model.units.nbytes_live() == 0
    return copy.deepcopy(dict(model.module.state_dict()))


def goes_on(folder: str, saved: str, stage: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer = built(stage)
    train(model, optimizer, range(5, 6))
    zero_optim.checkpoint.load(f"{folder}/{saved}", model=model, optimizer=optimizer)
    state = copy.deepcopy(dict(model.module.state_dict()))
    return state, train(model, optimizer, range(2, 4))


MORE: dict[str, Any] = {"master_dtype": torch.float64, "ema_decay": 0.5}  # with rows of their own


def content(model: Any, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The model, the average and the whole state, on rank 0."""
    with optimizer.averaged_weights():
        average = copy.deepcopy(dict(model.module.state_dict()))
    found = copy.deepcopy(dict(model.module.state_dict()))
    found.update({f"average {name}": tensor for name, tensor in average.items()})
    optimizer.consolidate_state_dict(to=0)
    if torch.distributed.get_rank() == 0:
        for index, state in optimizer.state_dict()["state"].items():
            found.update({f"{index} {key}": value for key, value in state.items()})
    return found


def saves_more(folder: str) -> dict[str, Any]:
    model, optimizer = built("fully", **MORE)
    train(model, optimizer, range(2))
    zero_optim.checkpoint.save(folder, model=model, optimizer=optimizer)
    return content(model, optimizer)


def loads_more(folder: str, stage: str, saved: str) -> dict[str, Any]:
    """Load, tell what there is, and save again."""
    model, optimizer = built(stage, **MORE)
    train(model, optimizer, range(5, 6))
    zero_optim.checkpoint.load(folder, model=model, optimizer=optimizer)
    zero_optim.checkpoint.save(saved, model=model, optimizer=optimizer)
    return content(model, optimizer)


@pytest.mark.parametrize("stage", ["fully", pytest.param("gradients", marks=pytest.mark.exhaustive)])
def test_masters_averages_and_state_go_from_two_ranks_to_four_and_back(
    ranks2: Ranks, ranks4: Ranks, tmp_path: Path, stage: str
) -> None:
    want = ranks2.run(saves_more, str(tmp_path / "2"))[0]
    there = ranks4.run(loads_more, str(tmp_path / "2"), stage, str(tmp_path / "4"))[0]
    back = ranks2.run(loads_more, str(tmp_path / "4"), "fully", str(tmp_path / "again"))[0]
    assert len(want) > 40
    for got in (there, back):
        assert got.keys() == want.keys()
        assert equal(got, want)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one[name], other[name]) for name in other]
    return all(torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("fully", "plain"), ("fully", "fully"), ("gradients", "fully")]
)
def test_a_checkpoint_loads_at_another_stage(ranks2: Ranks, tmp_path: Path, saved: str, loaded: str) -> None:
    (whole, *_) = ranks2.run(saves, str(tmp_path), saved)
    (state, losses), _ = ranks2.run(goes_on, str(tmp_path), saved, loaded)
    assert equal(state, whole)
    (_, wanted), _ = ranks2.run(goes_on, str(tmp_path), saved, "plain")
    assert losses == wanted


def test_files_are_those_of_whole_parameters(ranks2: Ranks, tmp_path: Path) -> None:
    loaded = []
    for stage in ("plain", "fully"):
        ranks2.run(saves, str(tmp_path), stage)
        consolidate(tmp_path / stage, tmp_path / f"{stage}.pt", weights=True)
        loaded.append(torch.load(tmp_path / f"{stage}.pt", weights_only=False))
    one, other = loaded
    assert equal(one, other)
    for name, tensor in one.items():
        assert not isinstance(tensor, torch.Tensor) or tensor.stride() == other[name].stride(), name


@on_ranks(2)
def test_the_whole_state_dict_comes_to_one_rank_unit_by_unit() -> None:
    model, optimizer = built("fully")
    train(model, optimizer, range(2))
    want = model.module.state_dict()
    sizes = [sum(bucket.nbytes for bucket in unit.buckets) for unit in model.units.units]
    live: list[int] = []
    for unit in model.units.units:
        take, bucket = unit.buckets[0].settle, unit.buckets[0]

        def look(flat: torch.Tensor, take: Any = take) -> None:
            take(flat)
            live.append(model.units.nbytes_live())

        bucket.settle = look
    state = full_state_dict(model, ranks=[1])
    assert live
    assert max(live) <= max(sizes)
    if torch.distributed.get_rank() == 1:
        assert state is not None
        assert state.keys() == want.keys()
        assert equal(state, want)
        assert state["last.weight"] is state["again.weight"]
    else:
        assert state is None
    with pytest.raises(ValueError, match="expected ranks from 0 to 1"):
        full_state_dict(model, ranks=[2])


@on_ranks(2)
def test_what_would_miss_parameters_is_refused() -> None:
    model, optimizer = built("fully")
    with pytest.raises(ValueError, match="give the optimizer too"):
        zero_optim.checkpoint.save("nowhere", model=model)
    with unsharded(model):
        with pytest.raises(RuntimeError, match="are whole for somebody to read"):
            zero_optim.checkpoint.save("nowhere", model=model, optimizer=optimizer)
        with pytest.raises(RuntimeError, match="are whole for somebody to read"):
            optimizer.step()
    train(model, optimizer, range(1))
