"""Gradients that nobody would reduce: they are reduced, or refused; no rank trains with its own."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    FullyShardedDataParallel,
    ShardedDataParallel,
    fully_shard,
    unsharded,
)


def made() -> tuple[nn.Sequential, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)


def in_place(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> nn.Module:
    fully_shard(model, optimizer, units=[*model.children()])
    return model


WRAPPERS: dict[str, Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module]] = {
    "gradients": ShardedDataParallel,
    "parameters": lambda model, optimizer: FullyShardedDataParallel(
        model, optimizer, units=[*model.children()]
    ),
    "in place": in_place,
}


def batch(rank: int) -> Tensor:
    return torch.full((2, 8), 1.0 + rank)


def unfreezes(kind: str) -> None:
    model, optimizer = made()
    model[0].requires_grad_(False)
    wrapped = WRAPPERS[kind](model, optimizer)
    for unfrozen in (False, True, False):
        model[0].requires_grad_(unfrozen)
        if unfrozen:
            with pytest.raises(RuntimeError, match=r"^0\.0\.weight, 0\.0\.bias did not require"):
                wrapped(batch(dist.get_rank()))
            with torch.no_grad():  # trains nothing
                wrapped(batch(dist.get_rank()))
        else:
            wrapped(batch(dist.get_rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_was_frozen_while_it_was_wrapped_cannot_be_trained_later(ranks2: Ranks, kind: str) -> None:
    ranks2.run(unfreezes, kind)


def calls_modules_first(kind: str) -> None:
    """The first backward pass of all, of modules that are called one by one."""
    model, optimizer = made()
    kept = WRAPPERS[kind](model, optimizer)
    x = batch(dist.get_rank())
    for block in model:
        x = block(x)
    x.sum().backward()
    optimizer.step()
    expected = [param.detach().clone() for param in made()[0].parameters()]
    grads = []
    for rank in range(2):
        alone = made()[0]
        alone(batch(rank)).sum().backward()
        grads.append([param.grad for param in alone.parameters()])
    for number, (one, two) in enumerate(zip(*grads, strict=True)):
        assert one is not None
        assert two is not None
        expected[number] -= one / 2 + two / 2
    with unsharded(model) if kind in ("parameters", "in place") else torch.no_grad():
        assert all(map(torch.equal, model.parameters(), expected))
    del kept


@pytest.mark.parametrize("kind", ["gradients", "parameters", "in place"])
def test_a_pass_of_modules_called_by_themselves_is_reduced_from_the_first_on(
    ranks2: Ranks, kind: str
) -> None:
    ranks2.run(calls_modules_first, kind)
