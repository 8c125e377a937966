"""Steps after which ranks do not meet: one that no gather tells of raised, or some had a closure."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from breaking import Breaks
from stalling import about_to_stall, linear, outcomes, stay_away
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.records import NO_STEP, LastStep
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel
from zero_optim.health import diagnosis
from zero_optim.health.diagnosis import Status, are_parted


def built(kind: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = linear()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), Breaks, lr=0.1)
    if kind == "units":
        return FullyShardedDataParallel(model, optimizer, units=[*model.children()]), optimizer
    return (DistributedDataParallel(model) if kind == "averaged" else model), optimizer


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss


def step_breaks(kept: list[object]) -> ZeroRedundancyOptimizer:
    """Train for three steps, of which the second raises on rank 1."""
    model, optimizer = built("units")
    kept += [model, optimizer]
    for number in range(3):
        Breaks.breaks = number == 1
        backward(model)
        optimizer.step()
    raise AssertionError("nothing was raised")


def go_on_after_a_step_that_raised(how: str) -> str:
    kept: list[object] = []
    with mock.patch.object(diagnosis, "_GOES_ON", 0.5):
        try:
            step_breaks(kept)
        except ArithmeticError:
            about_to_stall()
        if how == "drops it":
            kept.clear()
        elif how == "makes another call":
            optimizer = kept[1]
            assert isinstance(optimizer, ZeroRedundancyOptimizer)
            optimizer.consolidate_state_dict()
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


def step_with_a_closure_on_some(kind: str) -> str:
    model, optimizer = built(kind)
    about_to_stall()
    for number in range(4):
        if number != 2 or dist.get_rank() == 1:
            optimizer.step(lambda: backward(model))  # type: ignore[arg-type, return-value]
        else:
            backward(model)
            optimizer.step()
    return "stepped"


@pytest.mark.parametrize("kind", ["plain", "averaged", "units"])
def test_a_closure_that_some_ranks_lack_is_named_on_every_rank_long_before_the_timeout(kind: str) -> None:
    ended = outcomes(3, step_with_a_closure_on_some, kind)
    for outcome in ended:
        said = str(outcome.said)
        assert said.startswith(
            "StalledError: stalled: rank 1 called step() with a closure, and ranks 0, 2 "
        ), ended
        assert "give it on all ranks or on none" in said, ended


def test_ranks_are_parted_by_a_closure_in_the_same_step_alone() -> None:
    def stepped(number: int, closures: int) -> Status:
        return Status(("an exchange between all ranks",), (), {}, step=LastStep(number, closures))

    for other in (stepped(3, 0b10), stepped(4, 0b01)):
        assert are_parted(stepped(3, 0b11), other)
    for other in (stepped(3, 0b11), stepped(2, 0b00), stepped(4, 0b10), stepped(5, 0b00)):
        assert not are_parted(stepped(3, 0b11), other)


def test_ranks_are_parted_by_a_step_that_raised_if_another_rank_has_waited_in_a_call_for_long() -> None:
    def waits(passes: int, stuck: float, step: LastStep = NO_STEP) -> Status:
        call = ("forward pass", passes)
        return Status(("the gather",), (call,), dict([call]), stuck=stuck, step=step)

    failed = LastStep(failure="ArithmeticError in step(): on purpose")
    mine = Status((), (), {"forward pass": 2}, step=failed)
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
