"""Ranks of a fully sharded model tell each other in the forward pass what they did differently in a step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from breaking import Breaks
from fake_streams import without_thread
from fully import assert_equal_everywhere
from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.ddp import FullyShardedDataParallel
from zero_optim.errors import RankMismatchError, RemoteRankError


def make(**options: Any) -> tuple[FullyShardedDataParallel, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Breaks, lr=0.125)
    return FullyShardedDataParallel(model, optimizer, units=[*model], **options), optimizer


def forward(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 4)).sum()


def iterate(model: nn.Module, optimizer: ZeroRedundancyOptimizer, *, steps: int = 1) -> None:
    optimizer.zero_grad()
    forward(model).backward()
    for _ in range(steps):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_a_step_that_raises_on_one_rank_raises_on_all_in_the_next_forward_pass(reshards: bool) -> None:
    model, optimizer = make(reshard_after_forward=reshards)
    iterate(model, optimizer)
    optimizer.optim.breaks = True
    with pytest.raises(ArithmeticError) if dist.get_rank() == 1 else nullcontext():
        iterate(model, optimizer)
    optimizer.optim.breaks = False
    own = r"rank 1 failed with ArithmeticError in step\(\); its own output has more"
    match = own if dist.get_rank() == 1 else r"^rank 1 failed with ArithmeticError: no such root\. Ranks on"
    with pytest.raises(RemoteRankError, match=match):
        forward(model)
    iterate(model, optimizer)
    iterate(model, optimizer)
    assert_equal_everywhere(model)


@on_ranks(2)
def test_a_rate_that_differs_is_named_on_all_in_the_next_forward_pass() -> None:
    model, optimizer = make()
    iterate(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25 * (1 + dist.get_rank())
    iterate(model, optimizer)
    match = r"different options in step\(\): lr of group 0: rank 0 has 0.25; rank 1 has 0.5"
    with pytest.raises(RankMismatchError, match=match):
        forward(model)
    forward(model)  # it is said once
    iterate(model, optimizer)
    with pytest.raises(RankMismatchError, match=match):
        forward(model)
    optimizer.param_groups[0]["lr"] = 0.125
    iterate(model, optimizer)
    iterate(model, optimizer)
    assert_equal_everywhere(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "steps", "told"),
    [
        (2, 0, r"rank 0 made 3, the last one step\(\); rank 1 made 2, the last one step\(\)"),
        (2, 2, r"rank 0 made 3, the last one step\(\); rank 1 made 4, the last one step\(\)"),
        (0, 0, r"rank 0 made 1, the last one step\(\); rank 1 made 0\. All"),
    ],
)
def test_a_step_left_out_or_taken_twice_is_named_on_all_in_the_next_forward_pass(
    before: int, steps: int, told: str
) -> None:
    model, optimizer = make()
    for _ in range(before):
        iterate(model, optimizer)
    iterate(model, optimizer, steps=steps if dist.get_rank() == 1 else 1)
    with pytest.raises(RankMismatchError, match=told):
        forward(model)
    forward(model)
    iterate(model, optimizer, steps=1 if dist.get_rank() == 1 else steps)
    forward(model)
    assert_equal_everywhere(model)


def in_headers() -> AbstractContextManager[object]:
    """Gloo sends as other backends do: headers are gathered beside the rows."""
    return mock.patch.object(TRANSPORTS["gloo"], "waits_on_host", False)


@on_ranks(2)
@pytest.mark.parametrize("num_owners", [1, 2])
def test_units_of_one_owner_each_tell_of_a_difference(num_owners: int) -> None:
    """With one, the other rank owns nothing, and is heard too."""
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num_owners)))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.125)
    assert {piece.owner for pieces in optimizer.pieces().values() for piece in pieces} == {*range(num_owners)}
    model = FullyShardedDataParallel(module, optimizer, units=[*module])
    with in_headers():
        iterate(model, optimizer)
        iterate(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.25 * (1 + dist.get_rank())
        for _ in range(2):
            iterate(model, optimizer)
            with pytest.raises(RankMismatchError, match=r"rank 0 has 0.25; rank 1 has 0.5"):
                forward(model)
        optimizer.param_groups[0]["lr"] = 0.125
        iterate(model, optimizer)
        iterate(model, optimizer)
    assert_equal_everywhere(model)


def check_late() -> None:
    """The CPU passes for an accelerator."""
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.25 * (1 + dist.get_rank())
    iterate(model, optimizer)
    forward(model)
    optimizer.param_groups[0]["lr"] = 0.125
    with pytest.raises(RankMismatchError, match=r"rank 0 has 0.25; rank 1 has 0.5"):
        forward(model)
    iterate(model, optimizer)
    iterate(model, optimizer, steps=dist.get_rank())
    forward(model)
    with pytest.raises(RankMismatchError, match=r"rank 0 made 2, .*; rank 1 made 3, "):
        forward(model)


def test_on_an_accelerator_it_is_told_one_forward_pass_later(ranks2: Ranks) -> None:
    ranks2.run(without_thread, check_late)
