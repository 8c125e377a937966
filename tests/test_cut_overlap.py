"""Cut parameters stepped during the backward pass: the bits of the run that steps after it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cuts import cutting
from overlap import WRAPPERS, Setting, adamw, assert_same_params, assert_same_run, inputs
from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import zero_step
from zero_optim.step.partial import PartialGradient


class Wide(nn.Module):
    """Layers that are wide enough to be cut; one that not every pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 32, 3, padding=1)
        self.layers = nn.Sequential(nn.Linear(32 * 9, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, with_spare: bool = True) -> torch.Tensor:
        hidden = self.layers(self.conv(x).relu().flatten(1))
        out: torch.Tensor = self.head(hidden + self.spare(hidden) if with_spare else hidden)
        return out


def cut(build: Callable[..., ZeroRedundancyOptimizer] = adamw, **options: Any) -> Any:
    """Make what builds an optimizer whose parameters are cut."""
    return partial(_cut, build, options)


def _cut(
    build: Callable[..., ZeroRedundancyOptimizer], options: dict[str, Any], model: nn.Module
) -> ZeroRedundancyOptimizer:
    with cutting():
        optimizer = build(model, **options)
    if dist.get_world_size() > 1:
        assert sum(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return optimizer


def in_place(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    """A class that adds to gradients in place, so that steps need copies of them."""
    options = {"lr": 0.01, "bucket_cap_mb": 0.001, **options}
    return ZeroRedundancyOptimizer(model.parameters(), AddsToGradients, **options)


class AddsToGradients(torch.optim.Optimizer):
    """SGD with weight decay, which it adds to the gradients themselves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=0.1)
                    param.add_(param.grad, alpha=-group["lr"])


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [cut(in_place), cut(bucket_cap_mb=1.0)], ids=["in place", "one row"])
def test_stepping_cut_parameters_in_backward_gives_the_same_bits(optimizer: Any) -> None:
    """With a class that changes gradients in place, and with one row for each rank."""
    assert_same_run(Setting("ours", Wide, optimizer), steps=4)


def run(how: str | None, wrapper: str, optimizer: Any, *, spares: bool, **zero: Any) -> nn.Module:
    """Train, and check which gradients are left."""
    setting = Setting(wrapper, Wide, optimizer)
    model = WRAPPERS[wrapper](Wide(), bucket_cap_mb=0.004, find_unused_parameters=spares)
    sharded = setting.optimizer(model)
    if how is not None:
        model.register_comm_hook(
            None, zero_step(sharded, gradients=how, ddp=None if spares else model, **zero)
        )
    for step in range(4):
        sharded.zero_grad()
        model(inputs(step), not spares or (step % 2 == 0 and dist.get_rank() == 0)).square().mean().backward()
        if how == "owners":
            for param, pieces in sharded.pieces().items():
                is_whole_here = len(pieces) == 1 and pieces[0].owner == dist.get_rank()
                assert param.grad is None or is_whole_here != isinstance(param.grad, PartialGradient)
        sharded.step()
    return model


def check_owners(wrapper: str, spares: bool) -> None:
    for optimizer in (cut(),) if spares else (cut(), cut(in_place, bucket_cap_mb=1.0)):
        plain = run(None, wrapper, optimizer, spares=spares)
        for interleave in (True, False):
            model = run("owners", wrapper, optimizer, spares=spares, interleave=interleave)
            if dist.get_world_size() == 2:
                assert_same_params(model, plain)
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
                everywhere = param.detach().clone()
                dist.broadcast(everywhere, 0)
                assert torch.equal(everywhere, param), "ranks hold the same parameters"


@pytest.mark.parametrize("spares", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_rows_of_gradients_are_reduced_to_their_owners(ranks2: Ranks, wrapper: str, spares: bool) -> None:
    ranks2.run(check_owners, wrapper, spares)


def test_rows_of_gradients_are_reduced_to_four_owners(ranks4: Ranks) -> None:
    ranks4.run(check_owners, "ours", True)
