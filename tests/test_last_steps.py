"""Ranks that do not meet after a step: it raised on one of them, and no gather tells of it."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from breaking import Breaks
from stalling import about_to_stall, linear, outcomes, stay_away
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel
from zero_optim.health import diagnosis
from zero_optim.health.diagnosis import Status, are_parted


def built() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = linear()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), Breaks, lr=0.1)
    return FullyShardedDataParallel(model, optimizer, units=[*model.children()]), optimizer


def step_breaks(kept: list[Any]) -> ZeroRedundancyOptimizer:
    """Train for three steps, of which the second raises on rank 1."""
    model, optimizer = built()
    kept += [model, optimizer]
    for number in range(3):
        Breaks.breaks = number == 1
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    raise AssertionError("nothing was raised")


def go_on_after_a_step_that_raised(how: str) -> str:
    kept: list[Any] = []
    with mock.patch.object(diagnosis, "_GOES_ON", 0.5):
        try:
            step_breaks(kept)
        except ArithmeticError:
            about_to_stall()
        if how == "drops it":
            kept.clear()
        elif how == "makes another call":
            kept[1].consolidate_state_dict()
        stay_away()
    return "went on"


@pytest.mark.parametrize("how", ["keeps it", "drops it", "makes another call"])
def test_others_hear_of_a_step_that_raised_where_its_rank_catches_that_and_stays_away(how: str) -> None:
    """No wait here has a timeout of its own."""
    ended = outcomes(3, go_on_after_a_step_that_raised, how)
    for rank in (0, 2, *[1] * (how == "makes another call")):
        said = str(ended[rank].said)
        assert said.startswith("StalledError: stalled: rank 1 failed with ArithmeticError in step(): no"), (
            ended
        )
        assert "ranks 0, 2 wait in the gather of bucket" in said, ended


def test_ranks_are_parted_by_a_step_that_raised_if_another_rank_has_waited_in_a_call_for_long() -> None:
    def waits(passes: int, stuck: float, failure: str = "") -> Status:
        call = ("forward pass", passes)
        return Status(("the gather",), (call,), dict([call]), stuck=stuck, failure=failure)

    failed = "ArithmeticError in step(): on purpose"
    mine = Status((), (), {"forward pass": 2}, failure=failed)
    long = diagnosis._GOES_ON
    assert are_parted(mine, waits(3, long))
    for other in (
        waits(3, long / 2),
        waits(2, long),
        waits(3, long, failed),
        Status(("the gather",), (), {}),
    ):
        assert not are_parted(mine, other)
    assert not are_parted(Status((), (), {"forward pass": 2}), waits(3, long))
