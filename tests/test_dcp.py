"""State dicts of ``torch.distributed.checkpoint`` at every stage: equal bits on other ranks, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fully import Tower, adamw, assert_equal, train, whole
from pool import Ranks, on_ranks
from zero_optim import NotConsolidatedError, StateMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel

# torch.distributed.checkpoint imports what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
of_stages = pytest.mark.parametrize("stage", [1, 2, 3])


def built(stage: int) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = Tower()
    optimizer = adamw(model, weight_decay=0.1)
    if stage == 1:
        return DistributedDataParallel(model), optimizer
    if stage == 2:
        return ShardedDataParallel(model, optimizer), optimizer
    return FullyShardedDataParallel(model, optimizer, units=[*model.blocks]), optimizer


def trained(stage: int) -> tuple[Any, ZeroRedundancyOptimizer]:
    model, optimizer = built(stage)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    return model, optimizer


def content(model: Any, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """All weights and all state, by name."""
    weights = {f"weight {index}": value for index, value in enumerate(whole(model))}
    optimizer.consolidate_state_dict(to=None)
    dicts = optimizer.state_dict()
    state = {f"{key} {name}": value for key, each in dicts["state"].items() for name, value in each.items()}
    return {**weights, **state, "lr": [group["lr"] for group in dicts["param_groups"]]}


def saved(folder: Path, stage: int, way: str) -> dict[str, Any]:
    model, optimizer = trained(stage)
    if way == "whole":
        optimizer.consolidate_state_dict(to=None)
        weights, state = get_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": state}, folder / "whole.pt")
    else:
        objects = {"model": model.module, "optimizer": checkpoint.OptimizerState(optimizer, model)}
        dcp.save(objects, checkpoint_id=folder / "sharded")
    return content(model, optimizer)


def loaded(folder: Path, stage: int, way: str, steps: range) -> dict[str, Any]:
    model, optimizer = built(stage)
    train(model, optimizer, steps)
    if way == "whole":
        parts = torch.load(folder / "whole.pt")
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    else:
        objects = {"model": model.module, "optimizer": checkpoint.OptimizerState(optimizer, model)}
        dcp.load(objects, checkpoint_id=folder / "sharded", planner=checkpoint.SafeLoadPlanner())
    result = content(model, optimizer)
    train(model, optimizer, range(2, 4))
    return result


@of_stages
@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_what_two_ranks_save_one_and_four_load(
    ranks1: Ranks, ranks2: Ranks, ranks4: Ranks, tmp_path: Path, stage: int, way: str
) -> None:
    want = ranks2.run(saved, tmp_path, stage, way)[0]
    assert_equal(ranks1.run(loaded, tmp_path, stage, way, range(0))[0], want)
    assert_equal(ranks4.run(loaded, tmp_path, stage, way, range(5, 6))[0], want)


@on_ranks(2)
def test_what_would_lose_state_is_refused() -> None:
    """Every rank raises, and every rank goes on."""
    stage = 3
    flat, full = StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions(full_state_dict=True)
    model, optimizer = trained(stage)
    for options in (None, full, flat):
        with pytest.raises(NotConsolidatedError, match=r"call consolidate_state_dict\(to=\d\) on all ranks"):
            get_optimizer_state_dict(model, optimizer, options=options)
    optimizer.consolidate_state_dict(to=None)
    for options, error, words in (
        (full, NotConsolidatedError, "with the whole state on every rank and no options"),
        (flat, StateMismatchError, "get and set the state without this option"),
    ):
        state: Any = get_optimizer_state_dict(model, optimizer, options=options)
        other, fresh = built(stage)
        with pytest.raises(error, match=words):
            set_optimizer_state_dict(other, fresh, state, options=options)
    with pytest.raises(NotConsolidatedError, match=r"load with zero_optim\.checkpoint\.OptimizerState"):
        get_optimizer_state_dict(*built(stage))
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, optimizer))
    want = content(model, optimizer)
    assert_equal({**content(other, fresh), **dict(list(want.items())[: len(whole(other))])}, want)
