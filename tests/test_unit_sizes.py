"""Ranks that gather units of different sizes raise and say which; gloo does not end their processes."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from stalling import TIMEOUT, about_to_stall, outcomes
from test_unit_marks import WHAT, check, said
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, PrecisionPolicy

WIDTHS = (8, 40, 4, 24)


class Stops(torch.autograd.Function):
    """Raises in its backward pass where it is told to."""

    place = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if Stops.place == ctx.place:
            raise ArithmeticError("on purpose")
        return grad, None


class Uneven(nn.Module):
    """Blocks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in WIDTHS
        )
        self.left_out: int | None = None
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = in_model(block(x))
            if self.stops and number == 2:
                raise ArithmeticError("on purpose")
        return x


def in_model(x: Tensor) -> Tensor:
    return Stops.apply(x, "model")  # type: ignore[no-any-return]


Loss = Callable[[], Tensor]


def trained(**options: Any) -> tuple[Uneven, Loss, Callable[[], None]]:
    """Train for two steps; gives what computes the loss, and what takes one more step."""
    torch.manual_seed(0)
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = FullyShardedDataParallel(model, optimizer, units=model.blocks, **options)

    def loss() -> Tensor:
        made: Tensor = Stops.apply(wrapped(torch.ones(2, 8)), "loss")
        return made.sum()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step()
    step()
    return model, loss, step


def is_first() -> bool:
    return dist.get_rank() == 0


def one_training_pass_more() -> None:
    _, loss, step = trained()
    if is_first():
        loss()
    step()


def another_branch() -> None:
    model, loss, step = trained()
    model.left_out = 1 + dist.get_rank()
    with torch.no_grad():
        loss()
    model.left_out = None
    step()
    step()


def another_branch_in_training() -> None:
    model, _, step = trained(find_unused_parameters=True)
    model.left_out = 1 + dist.get_rank()
    step()
    model.left_out = None
    step()


def an_error_in_forward() -> None:
    model, _, step = trained()
    model.stops = is_first()
    with suppress(ArithmeticError):
        step()
    model.stops = False
    step()


def an_error_in_backward(place: str = "loss", **options: Any) -> None:
    _, _, step = trained(**options)
    Stops.place = place if is_first() else ""
    with suppress(ArithmeticError):
        step()
    Stops.place = ""
    step()


def an_error_in_the_model_in_backward() -> None:
    about_to_stall()
    an_error_in_backward("model", timeout=TIMEOUT)


def state_of_another_module() -> None:
    model, _, _ = trained(mixed_precision=PrecisionPolicy(params=torch.bfloat16))
    model.blocks[1 + is_first()].state_dict()


def another_module_of_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _, _ = trained(mesh=mesh)
    with torch.no_grad():
        model.blocks[dist.get_rank() % 2](torch.ones(2, 8))


CASES = [
    (one_training_pass_more, 3),
    (another_branch, 2),
    (another_branch_in_training, 3),
    (an_error_in_forward, 2),
    (an_error_in_backward, 2),
    (state_of_another_module, 2),
    (another_module_of_a_replica, 4),
]


@pytest.mark.parametrize(("differs", "size"), CASES)
def test_ranks_that_gather_units_of_different_sizes_raise(differs: Callable[[], None], size: int) -> None:
    ended = outcomes(size, said, differs)
    assert all(outcome.exitcode == 0 for outcome in ended), ended
    check(ended)


def test_where_a_rank_ends_its_broken_pass_and_others_gather_all_raise() -> None:
    ended = outcomes(2, said, an_error_in_the_model_in_backward)
    assert all(outcome.exitcode == 0 for outcome in ended), ended
    assert all(str(outcome.said).startswith((WHAT, "StalledError")) for outcome in ended), ended


def gathers_after_a_difference() -> list[str]:
    model, loss, _ = trained()
    differs = said(lambda: model.blocks[is_first()](torch.ones(2, 8)))
    return [differs, said(loss), said(model.state_dict), said(lambda: model.blocks[2](torch.ones(2, 8)))]


def test_after_a_difference_every_gather_raises_the_same() -> None:
    for outcome in outcomes(2, gathers_after_a_difference):
        assert outcome.said[0].startswith(WHAT)
        assert set(outcome.said) == {outcome.said[0]}
