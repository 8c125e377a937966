"""Ranks that gather different units of a fully sharded model raise, and say which; they never mix rows."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stalling import Outcome, outcomes
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.ddp import FullyShardedDataParallel

WHAT = "ranks gather different parts of a fully sharded model: "


class Routed(nn.Module):
    """Blocks of one size, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))
        self.left_out: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = block(x)
        return x


def trained(**options: bool) -> tuple[FullyShardedDataParallel, Routed, Callable[[], None]]:
    """Train for two steps; gives what trains for one more."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = FullyShardedDataParallel(model, optimizer, units=model.blocks, **options)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    step()
    step()
    return wrapped, model, step


def another_route_without_gradients() -> None:
    wrapped, model, step = trained()
    model.left_out = 1 + dist.get_rank()
    with torch.no_grad():
        wrapped(torch.ones(2, 8))
    model.left_out = None
    step()
    step()


def another_route_in_training() -> None:
    _, model, step = trained(find_unused_parameters=True)
    model.left_out = 1 + dist.get_rank()
    step()
    step()


def one_block_each() -> None:
    _, model, _ = trained()
    with torch.no_grad():
        model.blocks[2 * dist.get_rank()](torch.ones(2, 8))


def one_evaluation_more() -> None:
    wrapped, _, step = trained()
    with torch.no_grad():
        for _ in range(3 - dist.get_rank()):
            wrapped(torch.ones(2, 8))
    step()


def state_of_one_rank() -> None:
    wrapped, _, step = trained()
    if dist.get_rank() == 0:
        wrapped.state_dict()
    step()


def said(differs: Callable[[], None]) -> str:
    try:
        differs()
    except RankMismatchError as error:
        return str(error)
    return "trained"


def said_in_rows(differs: Callable[[], None]) -> str:
    """Send as other backends do, which have no tags: the marks are in the rows."""
    with mock.patch.object(TRANSPORTS["gloo"], "waits_on_host", False):
        return said(differs)


def check(ended: list[Outcome], *parts: str) -> None:
    """One rank raises, with some words; the other too, or it hears that the first one has ended."""
    told = [outcome.said for outcome in ended if str(outcome.said).startswith(WHAT)]
    assert told, ended
    assert all(str(outcome.said).startswith((WHAT, "StalledError")) for outcome in ended), ended
    for part in parts:
        assert part in told[0], (part, told)


@pytest.mark.parametrize(
    ("differs", "parts"),
    [
        (
            another_route_without_gradients,
            ("unit blocks.1, for a forward pass", "unit blocks.2, for a forward"),
        ),
        (another_route_in_training, ("unit blocks.1, for a ", "unit blocks.2, for a ")),
        (
            one_block_each,
            (
                "rank 0: unit blocks.0, for a forward pass without gradients",
                "rank 1: unit blocks.2, for a forward pass without gradients",
            ),
        ),
        (
            one_evaluation_more,
            (
                "rank 0: the outermost unit, for a forward pass without gradients",
                "rank 1: the outermost unit, for a forward pass in training",
            ),
        ),
        (
            state_of_one_rank,
            (
                "rank 0: the outermost unit, for unsharded() or a state dict",
                "rank 1: the outermost unit, for a forward pass in training",
            ),
        ),
    ],
)
def test_ranks_that_gather_different_units_raise_and_name_them(
    differs: Callable[[], None], parts: tuple[str, ...]
) -> None:
    check(outcomes(2, said, differs), *parts)


@pytest.mark.parametrize("differs", [another_route_in_training, one_block_each, one_evaluation_more])
def test_marks_in_the_rows_tell_the_same(differs: Callable[[], None]) -> None:
    check(outcomes(2, said_in_rows, differs), "rank 0: ", "rank 1: ", " unit")
