"""Gradients reduced to their owners alone: the same training, half the bytes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from overlap import run_either_way
from pool import Ranks, on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import allreduce_hook, zero_step
from zero_optim.hooks.overlap.owners import BucketOwnership
from zero_optim.plan.pieces import whole_piece

WRAPPERS = {"ours": DistributedDataParallel, "torch": TorchDdp}


class Net(nn.Module):
    """Some layers, and one that only rank 0 uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )
        self.odd, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, with_odd: bool) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y + self.odd(y) if with_odd else y


def train(wrapper: str, gradients: str | None, steps: int, **options: Any) -> nn.Module:
    model = WRAPPERS[wrapper](Net(), find_unused_parameters=True, bucket_cap_mb=0.0005, **options)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    if gradients is not None:
        model.register_comm_hook(None, zero_step(optimizer, gradients=gradients))
    owned = set(optimizer.owned_parameters())
    rank = dist.get_rank()
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator), rank == 0).square().mean().backward()
        if gradients == "owners":
            kept = {param for param in model.parameters() if param.grad is not None}
            assert kept <= owned, "only owners keep gradients"
        optimizer.step()
    return model


def check_equal(wrapper: str) -> None:
    exact = dist.get_world_size() == 2
    for options in ({}, {"gradient_as_bucket_view": True}):
        plain, reduced = (list(train(wrapper, how, 8, **options).parameters()) for how in (None, "owners"))
        if exact:
            assert_same_bits(reduced, plain)
        for a, b in zip(reduced, plain, strict=True):  # other ranks' sums are taken in another order
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for param in reduced:
            everywhere = param.detach().clone()
            dist.broadcast(everywhere, 0)
            assert torch.equal(everywhere, param), "ranks hold the same parameters"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_equals_that_with_gradients_everywhere(ranks: Ranks, wrapper: str) -> None:
    ranks.run(check_equal, wrapper)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_without_a_thread_training_equals_that_with_gradients_everywhere(ranks2: Ranks, wrapper: str) -> None:
    ranks2.run(run_either_way, True, check_equal, wrapper)


def check_order() -> None:
    """A step in the hook has the bits of one behind it; both sum gradients in the order of ranks."""
    hooked = train("ours", "owners", 4)
    module = Net()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    wrapped = ShardedDataParallel(module, optimizer, find_unused_parameters=True)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6, generator=generator), dist.get_rank() == 0).square().mean().backward()
        optimizer.step()
    assert_same_bits(list(hooked.parameters()), list(module.parameters()))


def test_four_ranks_give_the_bits_of_sharded_gradients(ranks4: Ranks) -> None:
    ranks4.run(check_order)


@on_ranks(2)
def test_what_cannot_be_reduced_to_owners_is_refused() -> None:
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="has a reduction of its own: leave out allreduce_hook"):
        zero_step(optimizer, allreduce_hook, gradients="owners")
    with pytest.raises(ValueError, match="got 'all'"):
        zero_step(optimizer, gradients="all")  # type: ignore[arg-type]
    partly = ZeroRedundancyOptimizer(copy.deepcopy(model).layers.parameters(), torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(None, zero_step(partly, gradients="owners"))
    with pytest.raises(ValueError, match="not in the optimizer, so they have no owner"):
        ddp(torch.ones(1, 6), True).sum().backward()


def test_neighbours_of_one_owner_travel_as_one_span() -> None:
    params = [torch.zeros(n) for n in (2, 3, 4, 1)]
    ownership = BucketOwnership.of(
        params, [whole_piece(owner, (n,)) for owner, n in ((1, 2), (1, 3), (0, 4), (1, 1))], 2
    )
    assert ownership.spans == (((5, 9),), ((0, 5), (9, 10)))
    assert ownership.slots == ((2,), (0, 1, 3))
