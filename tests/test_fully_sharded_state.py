"""Fully sharded models are saved by the owners of their rows, and load at any stage."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import Tower, adamw, assert_equal, batch, state_of, train
from pool import Ranks, on_ranks
from zero_optim import RemoteRankError, StateMismatchError, ZeroRedundancyOptimizer, checkpoint
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


def built(stage: str, width: int = 0) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Wrap a model, with masters and averages; with a width its matrices are so large that they are cut."""
    model = Tower(width, depth=1) if width else Convolved()
    optimizer = adamw(model, master_dtype=torch.float64, ema_decay=0.5)
    return STAGES[stage](model, optimizer), optimizer


def content(model: Any, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The model, the average and the whole state."""
    with optimizer.averaged_weights():
        average = state_of(model)
    told = state_of(model)
    told.update({f"average {name}": tensor for name, tensor in average.items()})
    optimizer.consolidate_state_dict(to=None)
    for index, state in optimizer.state_dict()["state"].items():
        told.update({f"{index} {key}": value for key, value in state.items()})
    return told


def saves(folder: Path, stage: str, width: int = 0) -> dict[str, Any]:
    """Train, save without a gather, and tell what there is."""
    model, optimizer = built(stage, width)
    train(model, optimizer, 2)
    gathers = optimizer.metrics(reset=False)["collectives/gather"]
    checkpoint.save(folder, model=model, optimizer=optimizer)
    assert optimizer.metrics(reset=False)["collectives/gather"] == gathers
    assert stage != "fully" or model.units.nbytes_live() == 0
    return content(model, optimizer)


@dataclass
class Loaded:
    """What there is after a load, the pieces of parameters that are cut, and the losses of what follows."""

    content: dict[str, Any]
    cuts: list[Any]
    losses: list[float]


def loads(folder: Path, stage: str, again: Path, width: int = 0) -> Loaded:
    """Load, save again, and train on."""
    model, optimizer = built(stage, width)
    train(model, optimizer, range(5, 6))
    checkpoint.load(folder, model=model, optimizer=optimizer)
    checkpoint.save(again, model=model, optimizer=optimizer)
    there = content(model, optimizer)
    cuts = [cut.pieces for cut in optimizer.core.cut_states().values()]
    return Loaded(there, cuts, train(model, optimizer, range(2, 4)))


@on_ranks(2)
def test_a_checkpoint_loads_at_another_stage(tmp_path: Path) -> None:
    """Files are those of whole parameters."""
    want = saves(tmp_path / "plain", "plain")
    losses = loads(tmp_path / "plain", "plain", tmp_path / "again").losses
    for stage in ("gradients", "fully"):
        assert_equal(saves(tmp_path / stage, stage), want)
    for folder, stage in (("fully", "plain"), ("fully", "fully"), ("gradients", "fully")):
        loaded = loads(tmp_path / folder, stage, tmp_path / f"{folder} {stage}")
        assert_equal(loaded.content, want)
        assert loaded.losses == losses
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


def test_state_masters_and_averages_of_cut_parameters_go_from_two_ranks_to_three_and_back(
    ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    want = ranks2.run(saves, tmp_path / "saved", "fully", 128)[0]
    up = ranks3.run(loads, tmp_path / "saved", "fully", tmp_path / "there", 128)[0]
    back = ranks2.run(loads, tmp_path / "there", "fully", tmp_path / "back", 128)[0]
    assert len(want) > 40
    assert_equal(up.content, want)
    assert_equal(back.content, want)
    assert up.cuts
    assert back.cuts
    assert up.cuts != back.cuts


@on_ranks(2)
def test_the_whole_state_dict_comes_to_one_rank_unit_by_unit() -> None:
    model, optimizer = built("fully")
    train(model, optimizer, 2)
    want = state_of(model)
    sizes = [sum(bucket.nbytes for bucket in unit.buckets) for unit in model.units.units]
    live: list[int] = []
    for unit in model.units.units:
        values = unit.buckets[0].values
        take = values.receive

        def look(flat: Tensor, changed: Any = None, take: Any = take) -> None:
            take(flat, changed)
            live.append(model.units.nbytes_live())

        values.receive = look
    state = full_state_dict(model, ranks=[1])
    for unit in model.units.units:
        del unit.buckets[0].values.receive  # which keeps the model
    assert live
    assert max(live) <= max(sizes)
    if torch.distributed.get_rank() == 1:
        assert_equal(state, want)
        assert state["last.weight"] is state["again.weight"]
    else:
        assert state is None
    with pytest.raises(ValueError, match="expected ranks from 0 to 1"):
        full_state_dict(model, ranks=[2])


@on_ranks(2)
def test_what_would_miss_parameters_is_refused() -> None:
    model, optimizer = built("fully")
    with pytest.raises(ValueError, match="pass optimizer= too"):
        checkpoint.save("nowhere", model=model)
    with unsharded(model):
        for call in (lambda: checkpoint.save("nowhere", model=model, optimizer=optimizer), optimizer.step):
            with pytest.raises(RuntimeError, match="inside unsharded"):
                call()
    train(model, optimizer, 1)


@on_ranks(1)
def test_one_rank_alone(tmp_path: Path) -> None:
    (plain, one), (model, other) = built("plain"), built("fully")
    assert train(model, other, 2) == train(plain, one, 2)
    checkpoint.save(tmp_path, model=model, optimizer=other)
    state = full_state_dict(model)
    assert_equal(state, state_of(plain))
    train(model, other, range(5, 6))
    checkpoint.load(tmp_path, model=model, optimizer=other)
    assert_equal(state_of(model), state)
    assert train(model, other, range(2, 4)) == train(plain, one, range(2, 4))
    assert model.units.nbytes_live() == 0
    with torch.no_grad(), unsharded(model):
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(2)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(4)), plain.eval()(batch(4)))
    assert train(model.train(), other, range(5, 6)) == train(plain.train(), one, range(5, 6))
    assert_equal(state_of(model), state_of(plain))


@on_ranks(2)
@pytest.mark.parametrize("width", [0, 128], ids=["whole", "cut"])
def test_own_rows_are_saved_without_communication_and_loaded(tmp_path: Path, width: int) -> None:
    (model, optimizer), (other, another) = built("fully", width), built("fully", width)
    train(model, optimizer, 2)
    want = state_of(model)
    sent = optimizer.metrics(reset=False)
    state = model.local_state_dict()
    assert optimizer.metrics(reset=False) == sent
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(state, path)
    cut = 0
    for key, rows in state.items():
        name, _, place = key.removesuffix("]").partition("[")
        cut += bool(place)
        first, last = map(int, place.split(":")) if place else (None, None)
        if isinstance(rows, torch.Tensor):  # not extra state
            assert torch.equal(rows, want[name][first:last] if place else want[name]), key
    assert bool(cut) == bool(width)
    train(model, optimizer, range(2, 3))
    train(other, another, range(7, 8))
    for target in (model, other):
        target.load_local_state_dict(torch.load(path, weights_only=True))
        assert_equal(state_of(target), want)
    train(other, another, range(2, 3))
    before, foreign = state_of(other), torch.load(path, weights_only=True)
    if dist.get_rank():
        foreign = torch.load(tmp_path / "0.pt", weights_only=True)
    with pytest.raises((StateMismatchError, RemoteRankError), match="differs from what this rank has"):
        other.load_local_state_dict(foreign)
    assert_equal(state_of(other), before)
    with unsharded(other), pytest.raises(RuntimeError, match="inside unsharded"):
        other.local_state_dict()
