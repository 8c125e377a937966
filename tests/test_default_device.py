"""A default device of PyTorch's says where the user's tensors are, not where the library's are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fully import Tower, assert_equal, batch, state_of
from pool import on_ranks
from training import assert_same_value
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def stepped(model: Any, optimizer: Any) -> Any:
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, zero_step(optimizer))
    return wrapped


STAGES: dict[str, Callable[[Any, Any], Any]] = {
    "zero_step": stepped,
    "2": ShardedDataParallel,
    "3": lambda model, optimizer: FullyShardedDataParallel(model, optimizer, units=[*model.blocks]),
}


def run(stage: str, device: str | None, folder: Path) -> tuple[dict[str, Any], Any]:
    models: list[Tower] = [Tower(), Tower()]
    x = [batch(number) for number in range(3)]
    with default_device(device):
        trained = []
        for model in models:
            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
            trained.append((STAGES[stage](model, optimizer), optimizer))
        wrapped, optimizer = trained[0]
        for each in x:
            wrapped(each).square().mean().backward()
            if stage != "zero_step":  # which has stepped
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(to=None)
        whole = optimizer.state_dict()
        checkpoint.save(folder / stage / str(device), model=wrapped, optimizer=optimizer)
        other, later = trained[1]
        checkpoint.load(folder / stage / str(device), model=other, optimizer=later)
        later.load_state_dict(whole)
        other(x[0]).square().mean().backward()
        later.step()
    return whole, state_of(other)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_default_device_does_not_move_what_the_library_makes(tmp_path: Path, stage: str) -> None:
    (want_state, want), (got_state, got) = (run(stage, device, tmp_path) for device in (None, "meta"))
    assert_equal(got, want)
    assert_same_value(got_state["state"], want_state["state"])
