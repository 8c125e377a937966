"""A hook that steps and reduces gradients to their owners alone: what `test_parity` does not show of it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from overlap import run_either_way
from pool import on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import allreduce_hook, passes, zero_step
from zero_optim.hooks.owners import BucketOwnership
from zero_optim.plan.pieces import whole_piece
from zero_optim.step.partial import PartialGradient

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
            there = [param for param in model.parameters() if param.grad is not None]
            assert all(isinstance(param.grad, PartialGradient) == (param not in owned) for param in there)
        optimizer.step()
    return model


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


class Frozen(nn.Module):
    """A frozen layer in the bucket of a trained one behind it; an earlier one trains, so both are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.frozen, self.late = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.late(self.frozen(self.early(x).tanh()).tanh())
        return y


@on_ranks(2)
@pytest.mark.parametrize("inline", [False, True], ids=["thread", "inline"])
@pytest.mark.parametrize("as_views", [True, False], ids=["views", "packed"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_bucket_with_frozen_parameters_is_stepped_when_the_others_are_reduced(
    wrapper: str, as_views: bool, inline: bool
) -> None:
    """The backward pass reads the frozen layer after that, and goes on."""
    run_either_way(inline, check_frozen, wrapper, as_views)


def check_frozen(wrapper: str, as_views: bool) -> None:
    runs = []
    for overlaps in (False, True):
        model = WRAPPERS[wrapper](Frozen(), bucket_cap_mb=0.00001)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            lr=0.1,
            bucket_cap_mb=0.0002,  # the last two layers in one bucket
            parameters_as_bucket_view=as_views,
        )
        if overlaps:
            model.register_comm_hook(None, zero_step(optimizer, allreduce_hook))
        runs.append((model, optimizer))
    overlap, stepped_late = runs[1][1].iteration.overlap(), list[int]()
    for step in range(3):
        for model, optimizer in runs:
            optimizer.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(passes.SteppedPass, "step_late", noted(stepped_late))
                model(x).square().mean().backward()
            optimizer.step()
        assert_same_bits(list(runs[1][0].parameters()), list(runs[0][0].parameters()))
    assert overlap.current is None
    assert stepped_late == [0, 0, 0], "all were stepped before the backward pass ended"


def noted(numbers: list[int]) -> Any:
    step_late = passes.SteppedPass.step_late

    def late(self: passes.SteppedPass, **kwargs: bool) -> None:
        numbers.append(len(self.reduced))
        step_late(self, **kwargs)

    return late


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_pass_without_zero_grad_raises_on_every_rank(wrapper: str) -> None:
    model = WRAPPERS[wrapper](Net(), find_unused_parameters=True, bucket_cap_mb=0.0005)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.register_comm_hook(None, zero_step(optimizer, gradients="owners"))
    model(torch.ones(4, 6), True).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of parameter .*(?s:.*)[Cc]all zero_grad\(\)"):
        model(torch.ones(4, 6), True).sum().backward()
    dist.barrier()  # with the optimizer alive: else the other rank may hear that this one has let go of it


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_passes_add_up_where_one_rank_owns_every_parameter(wrapper: str) -> None:
    runs = []
    for gradients in ("everywhere", "owners"):
        torch.manual_seed(0)
        model = WRAPPERS[wrapper](nn.Linear(4, 4, bias=False))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model.register_comm_hook(None, zero_step(optimizer, gradients=gradients))  # type: ignore[arg-type]
        for step in range(3):
            model(torch.full((2, 4), float(step + dist.get_rank()))).square().mean().backward()
            optimizer.step()
        runs.append(list(model.parameters()))
    assert_same_bits(*runs)
