"""Cut parameters stepped during the backward pass: the bits of the run that steps after it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from cuts import cutting
from overlap import WRAPPERS, Grads, Setting, adamw, assert_same_params, assert_same_run, inputs, plain_step
from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import zero_step
from zero_optim.hooks.owners import BucketOwnership
from zero_optim.plan.pieces import Piece
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


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "held back": {"zero": {"interleave": False}},
    "fused, packed": {"optimizer": cut(fused=True, parameters_as_bucket_view=False)},
    "averages": {"optimizer": cut(ema_decay=0.9)},
    "gradients changed in place": {"optimizer": cut(in_place)},
    "one row a rank": {"optimizer": cut(bucket_cap_mb=1.0)},
    "gradients in buckets": {"options": {"gradient_as_bucket_view": True}},
}


def settings(name: str, wrapper: str) -> Setting:
    return Setting(wrapper, Wide, **{"optimizer": cut(), **SETTINGS[name]})


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_stepping_cut_parameters_in_backward_gives_the_same_bits(name: str, wrapper: str) -> None:
    assert_same_run(settings(name, wrapper), steps=4)


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


@on_ranks(2)
@pytest.mark.parametrize("how", ["everywhere", "owners"])
def test_masters_of_cut_parameters_are_stepped_in_backward(how: str) -> None:
    """bf16 parameters with masters; half of a batch that gives zeros only."""
    wrapper = "ours"

    def build() -> nn.Module:
        return Wide().to(torch.bfloat16)

    optimizer = cut(master_dtype=torch.float32)
    setting = Setting(wrapper, build, optimizer, zero={} if how == "everywhere" else {"gradients": how})

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Grads:
        optimizer.zero_grad()
        model(inputs(number).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        return []

    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    for number in range(5):
        step(plain, one, number)
        step(model, other, number)
        assert_same_params(model, plain, number)


def check_join(wrapper: str) -> None:
    """Rank 1 has two batches, rank 0 five."""
    models = []
    for overlap in (False, True):
        model, optimizer = Setting(wrapper, Wide, cut()).build(overlap)
        with Join([model, optimizer]):
            for step in range(2 if dist.get_rank() else 5):
                plain_step(model, optimizer, step)
        models.append(model)
    assert_same_params(*models)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_uneven_inputs_reach_the_owners_of_rows(ranks2: Ranks, wrapper: str) -> None:
    ranks2.run(check_join, wrapper)


@on_ranks(2)
def test_the_next_forward_pass_may_wait_for_the_pieces() -> None:
    setting = Setting("ours", Wide, cut())
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    other.gather_lazily(model)
    for step in range(5):
        plain_step(plain, one, step)
        plain_step(model, other, step)
    other.wait_for_gathers()
    assert_same_params(model, plain)


def test_a_parameter_has_a_span_for_each_of_its_owners() -> None:
    params = [torch.zeros(3), torch.zeros(4, 2), torch.zeros(())]
    pieces = [(Piece(0, 0, 3),), (Piece(0, 0, 1), Piece(2, 1, 4)), (Piece(2, 0, 1),)]
    ownership = BucketOwnership.of(params, pieces, 3)
    assert ownership.spans == (((0, 5),), (), ((5, 12),))
    assert ownership.slots == ((0, 1), (), (1, 2))
