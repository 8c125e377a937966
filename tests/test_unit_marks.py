"""Ranks that gather different units raise and say which: they never mix rows, and gloo does not end them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from breaking import Stops, in_backward_of
from fully import NARROW
from stalling import TIMEOUT, Outcome, about_to_stall, outcomes
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.ddp import FullyShardedDataParallel

WHAT = "ranks gather different parts of a fully sharded model: "
EQUAL, UNEVEN = (8, 8, 8, 8), (8, 40, 4, 24)  # widths of blocks


class Routed(nn.Module):
    """Blocks, one of which may be left out."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths
        )
        self.left_out: int | None = None
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = in_backward_of("model", block(x))
            if self.stops and number == 2:
                raise ArithmeticError("on purpose")
        return x


Trained = tuple[Any, Callable[[], Tensor], Callable[[], None]]


def trained(widths: tuple[int, ...], **options: Any) -> Trained:
    """Train for two steps; gives the wrapper, what computes the loss, and what takes one more step."""
    torch.manual_seed(0)
    model = Routed(widths)
    group = options["mesh"].get_group("shard") if "mesh" in options else None
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1)
    wrapped = FullyShardedDataParallel(model, optimizer, units=model.blocks, **options)

    def loss() -> Tensor:
        return in_backward_of("loss", wrapped(torch.ones(2, 8))).sum()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step()
    step()
    return wrapped, loss, step


def is_first() -> bool:
    return dist.get_rank() == 0


def another_route_in_training(widths: tuple[int, ...]) -> None:
    wrapped, _, step = trained(widths, find_unused_parameters=True)
    wrapped.module.left_out = 1 + dist.get_rank()
    step()
    wrapped.module.left_out = None
    step()


def one_block_each(widths: tuple[int, ...]) -> None:
    wrapped, _, _ = trained(widths)
    with torch.no_grad():
        wrapped.module.blocks[2 * dist.get_rank()](torch.ones(2, 8))


def state_of_one_rank(widths: tuple[int, ...]) -> None:
    wrapped, _, step = trained(widths)
    if is_first():
        wrapped.state_dict()
    step()


def an_error_in_backward(widths: tuple[int, ...], place: str = "loss", **options: Any) -> None:
    _, _, step = trained(widths, **options)
    Stops.place = place if is_first() else ""
    with suppress(ArithmeticError):
        step()
    Stops.place = ""
    step()


def an_error_in_the_model_in_backward(widths: tuple[int, ...]) -> None:
    about_to_stall()
    an_error_in_backward(widths, "model", timeout=TIMEOUT)


def state_of_another_module(widths: tuple[int, ...]) -> None:
    wrapped, _, _ = trained(widths, mixed_precision=NARROW)
    wrapped.module.blocks[1 + is_first()].state_dict()


def said(differs: Callable[..., object], *args: Any) -> str:
    try:
        differs(*args)
    except RankMismatchError as error:
        return str(error)
    return "trained"


def said_in_headers(differs: Callable[..., object], *args: Any) -> str:
    """Send as other backends do, which have no tags: the marks are in the headers alone."""
    with mock.patch.object(TRANSPORTS["gloo"], "waits_on_host", False):
        return said(differs, *args)


def check(ended: list[Outcome], *parts: str) -> None:
    """One rank raises, with some words; the others too, or they hear that it has ended."""
    told = [outcome.said for outcome in ended if str(outcome.said).startswith(WHAT)]
    assert told, ended
    assert all(str(outcome.said).startswith((WHAT, "StalledError")) for outcome in ended), ended
    for part in parts:
        assert part in told[0], (part, told)


ROOT, OUTSIDE = "the outermost unit", "a forward pass without gradients"
TRAINS = f"{ROOT}, for a forward pass in training"


@pytest.mark.parametrize(
    ("differs", "parts"),
    [
        (another_route_in_training, ("unit blocks.1, for a ", "unit blocks.2, for a ")),
        (one_block_each, (f"rank 0: unit blocks.0, for {OUTSIDE}", f"rank 1: unit blocks.2, for {OUTSIDE}")),
        (state_of_one_rank, (f"rank 0: {ROOT}, for unsharded() or a state dict", f"rank 1: {TRAINS}")),
    ],
)
def test_ranks_that_gather_different_units_raise_and_name_them(
    differs: Callable[..., None], parts: tuple[str, ...]
) -> None:
    check(outcomes(2, said, differs, EQUAL), *parts)


def test_marks_in_headers_alone_tell_the_same() -> None:
    check(outcomes(2, said_in_headers, another_route_in_training, EQUAL), "rank 0: ", "rank 1: ", " unit")


@pytest.mark.parametrize(
    ("differs", "size"),
    [(another_route_in_training, 3), (an_error_in_backward, 2), (state_of_another_module, 2)],
)
def test_ranks_that_gather_units_of_different_sizes_raise(differs: Callable[..., None], size: int) -> None:
    ended = outcomes(size, said, differs, UNEVEN)
    assert all(outcome.exitcode == 0 for outcome in ended), ended
    check(ended)


def test_where_a_rank_ends_its_broken_pass_and_others_gather_all_raise() -> None:
    ended = outcomes(2, said, an_error_in_the_model_in_backward, UNEVEN)
    assert all(outcome.exitcode == 0 for outcome in ended), ended
    assert all(str(outcome.said).startswith((WHAT, "StalledError")) for outcome in ended), ended
