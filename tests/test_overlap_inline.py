"""An overlapped step of two models, and of a bucket with frozen parameters, with a thread or without."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from overlap import WRAPPERS, assert_same_params, both_wrappers, either_way, inputs
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import passes, zero_step
from zero_optim.step.owned import OwnedState


class Around(nn.Module):
    """Its backward pass goes through the last layer, another model, then the first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(18, 18), nn.Linear(18, 18)

    def forward(self, x: Tensor, inner: nn.Module) -> Tensor:
        x = x.flatten(1)
        hidden: Tensor = self.first(x)
        return self.last(hidden + inner(x))


@on_ranks(2)
@either_way
def test_two_hooks_of_one_optimizer_step_in_one_pass(inline: bool) -> None:
    """The optimizer's bucket has layers of both models."""
    runs = []
    for overlap in (False, True):
        pair = [WRAPPERS["ours"](net, bucket_cap_mb=0.0001) for net in (Around(), nn.Linear(18, 18))]
        with torch.no_grad():
            for param in pair[1].parameters():
                param.fill_(0.1)
        params = [param for model in pair for param in model.parameters()]
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)
        for model in pair if overlap else ():
            model.register_comm_hook(None, zero_step(optimizer))
        runs.append((pair, optimizer))
    for number in range(4):
        for (outer, inner), optimizer in runs:
            optimizer.zero_grad()
            outer(inputs(number), inner).square().mean().backward()
            optimizer.step()
        for plain, model in zip(runs[0][0], runs[1][0], strict=True):
            assert_same_params(model, plain, number)


# ---------------------------------------------------------------------- several buckets at once


@on_ranks(2)
@either_way
def test_hooks_step_an_eighth_of_the_rest_at_once_and_a_thread_each_bucket(inline: bool) -> None:
    net = nn.Sequential(*(nn.Linear(18, 18) for _ in range(32)))
    model = WRAPPERS["ours"](net, bucket_cap_mb=0.001)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, bucket_cap_mb=0.001)
    model.register_comm_hook(None, zero_step(optimizer))
    engine, taken = optimizer.core.engine, list[int]()
    step = OwnedState.step

    def counted(owned: OwnedState, groups: Any, closure: Any, gradients: Any, /, **kwargs: Any) -> Any:
        taken.append(len(engine.buckets_of(gradients)))
        return step(owned, groups, closure, gradients, **kwargs)

    for number in range(3):
        taken.clear()
        with mock.patch.object(OwnedState, "step", counted):
            model(inputs(number).flatten(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(taken) == len(engine.buckets) > 16
    assert taken[-1] == 1
    assert taken[0] == (-(-len(engine.buckets) // 8) if inline else 1), taken


# ---------------------------------------------------------------------- frozen parameters


@on_ranks(2)
@either_way
@both_wrappers
def test_a_bucket_with_frozen_parameters_is_stepped_when_the_others_are_reduced(
    wrapper: str, inline: bool
) -> None:
    """The backward pass reads the frozen layer after that, and goes on."""
    runs = []
    for overlaps in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(),
            torch.optim.SGD,
            lr=0.1,
            bucket_cap_mb=0.0002,  # the last two layers in one bucket
        )
        net[2].requires_grad_(False)  # the earlier one trains, so it is read
        model = WRAPPERS[wrapper](net, bucket_cap_mb=0.00001)
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
        assert_same_params(runs[1][0], runs[0][0], step)
    assert overlap.current is None
    assert stepped_late == [0, 0, 0], "all were stepped before the backward pass ended"


def noted(numbers: list[int]) -> Any:
    step_late = passes.SteppedPass.step_late

    def late(self: passes.SteppedPass, **kwargs: bool) -> None:
        numbers.append(len(self.reduced))
        step_late(self, **kwargs)

    return late
