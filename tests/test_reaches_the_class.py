"""What a user does to the optimizer reaches the class as if it were not sharded."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from own_classes import Small
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer


class Scaled(Small):
    """Scales gradients by an attribute that users set. Calls no other class's step, which may have hooks."""

    factor = 1.0

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * self.factor)


class Base(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Child(Base):
    """Has no step of its own, until PyTorch gives it one at its first instance."""


def halves_of(value: float) -> float:
    return value / 2


UNHASHABLE: dict[str, Any] = {"function": halves_of, "array": np.ones(2)}


def built(cls: Any = Scaled) -> tuple[list[nn.Parameter], ZeroRedundancyOptimizer]:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    return params, ZeroRedundancyOptimizer(params, cls, lr=1.0)


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [float(param[0].detach()) for param in params]


def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)


@on_ranks(2)
def test_hooks_for_all_optimizers_run_once_a_step() -> None:
    params, optimizer = built()
    seen: list[str] = []
    inner = optimizer.optim.register_step_post_hook(lambda *_: seen.append("of the class"))
    handles = [
        register_optimizer_step_pre_hook(halve),
        register_optimizer_step_post_hook(lambda it, *_: seen.append(type(it).__name__)),
    ]
    try:
        stepped = step(params, optimizer)
    finally:
        for handle in (*handles, inner):
            handle.remove()
    assert stepped == [-0.5] * 3
    assert seen == ["of the class", "ZeroRedundancyOptimizer"]


@on_ranks(2)
def test_attributes_that_the_class_has_are_written_to_it() -> None:
    params, optimizer = built()
    optimizer.factor = 0.5
    optimizer.factor *= 0.5
    optimizer.note = "of the user"  # type: ignore[attr-defined]
    assert step(params, optimizer) == [-0.25] * 3
    assert optimizer.factor == optimizer.optim.factor == 0.25
    assert optimizer.note == "of the user"
    assert not hasattr(optimizer.optim, "note")


def supports_scaling(optimizer: Any) -> bool:
    return bool(optimizer._step_supports_amp_scaling)


@on_ranks(2)
def test_attributes_of_the_class_outlive_its_process_group() -> None:
    params, optimizer = built()
    optimizer.factor = 0.5
    optimizer.detach()
    optimizer.rebind()
    assert step(params, optimizer) == [-0.5] * 3


@on_ranks(2)
@pytest.mark.parametrize("looks", [inspect.getmembers, supports_scaling])
def test_looking_at_attributes_on_one_rank_changes_nothing(looks: Callable[[Any], Any]) -> None:
    params, optimizer = built()
    step(params, optimizer)
    if dist.get_rank() == 0:
        looks(optimizer)
    step(params, optimizer)


@on_ranks(2)
def test_a_class_that_one_rank_has_used_before_is_the_same_class() -> None:
    if dist.get_rank() == 0:
        Base([nn.Parameter(torch.zeros(2))], lr=0.1)
    built(Child)


@on_ranks(2)
@pytest.mark.parametrize("kind", UNHASHABLE)
def test_a_group_may_have_values_that_cannot_be_hashed(kind: str) -> None:
    value = UNHASHABLE[kind]
    param = nn.Parameter(torch.zeros(4))
    groups = [{"params": [param], "tag": value}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0, allow_unsaved=True)
    assert step([param], optimizer) == [-1.0]


@on_ranks(1)
def test_a_private_name_of_the_class_is_refused_with_the_reason() -> None:
    optimizer: Any = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.Adafactor, lr=0.1)
    with pytest.raises(AttributeError, match="no attribute '_init_group', and shows no private names"):
        optimizer._init_group  # noqa: B018
