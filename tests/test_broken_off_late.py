"""A backward pass that an exception ends, while a thread of the autograd engine still keeps what it got.

On an accelerator such a thread may let go of a pass after ``backward()`` has raised, even when the next pass
runs. Here a list keeps it, and lets go when the test says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.compat.engine import after_backward
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.ddp.reducer import inbox
from zero_optim.errors import ReductionError


@contextmanager
def kept() -> Iterator[list[Callable[[], None]]]:
    """Keep what the engine is to call."""
    callbacks: list[Callable[[], None]] = []

    def keep(callback: Callable[[], None]) -> None:
        callbacks.append(callback)
        after_backward(callback)

    with mock.patch.object(inbox, "after_backward", keep):
        yield callbacks


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            x = layer(x)
            if number == 1:
                x.register_hook(lambda _: self.in_backward())  # half of the gradients have come
        return x


def build(kind: str) -> tuple[Net, Any, ZeroRedundancyOptimizer]:
    net = Net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.0001)
    if kind == "whole":
        return net, DistributedDataParallel(net, bucket_cap_mb=0.0001), optimizer
    if kind == "gradients":
        return net, ShardedDataParallel(net, optimizer), optimizer
    return net, FullyShardedDataParallel(net, optimizer, units=[*net]), optimizer


def step(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + number + dist.get_rank())).square().mean().backward()
    optimizer.step()


def values(kind: str, net: Net) -> list[Tensor]:
    if kind != "parameters":
        return [param.detach().clone() for param in net.parameters()]
    with unsharded(net, writes=False):
        return [param.detach().clone() for param in net.parameters()]


def goes_on(kind: str, fails_on: tuple[int, ...]) -> None:
    net, model, optimizer = build(kind)
    for number in range(3):
        step(model, optimizer, number)
    expected = values(kind, net)

    net, model, optimizer = build(kind)
    step(model, optimizer, 0)
    with kept() as callbacks:

        def fail() -> None:
            if dist.get_rank() in fails_on:
                raise ValueError("the user's")

        net.in_backward = fail
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() in fails_on:
            with pytest.raises(ValueError, match="the user's"):
                loss.backward()
            with pytest.raises(ReductionError, match="ended with an exception"):
                model(torch.ones(2, 4))
        else:
            with pytest.raises(ReductionError, match="ended with an exception"):
                loss.backward()
        net.in_backward = callbacks.clear  # only now, while the next pass runs
        step(model, optimizer, 1)
        net.in_backward = lambda: None
        step(model, optimizer, 2)
    assert all(map(torch.equal, values(kind, net), expected))


@pytest.mark.parametrize(
    ("kind", "fails_on"),
    [
        ("whole", (0,)),
        ("whole", (0, 1)),
        ("gradients", (0,)),
        ("gradients", (0, 1)),
        ("parameters", (0, 1)),  # on one rank alone marks of units differ
    ],
)
def test_a_pass_that_broke_off_is_told_of_in_the_next_forward_pass_though_the_engine_still_keeps_it(
    ranks2: Ranks, kind: str, fails_on: tuple[int, ...]
) -> None:
    ranks2.run(goes_on, kind, fails_on)
