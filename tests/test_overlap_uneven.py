"""Unused parameters and uneven inputs, with the step taken during the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler

from overlap import (
    WRAPPERS,
    Grads,
    Net,
    Setting,
    assert_same_params,
    assert_same_run,
    both_wrappers,
    either_way,
    grads_of,
    inputs,
    loss_of,
    run_either_way,
)
from pool import on_ranks
from training import assert_same_state, whole
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    zero_step,
)
from zero_optim.iteration.overlap import OverlappedStep

MAY_BE_UNUSED = {"find_unused_parameters": True}


def step_with(use: Callable[[int, int], bool], factor: float = 1.0) -> Callable[..., Grads]:
    """A step in which ``use(step, rank)`` says whether this rank uses the spare layer."""

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Grads:
        optimizer.zero_grad(set_to_none=number % 4 < 2)
        output: Tensor = model(inputs(number), use(number, dist.get_rank()))
        (output.square().mean() * factor).backward()
        grads = grads_of(model)
        optimizer.step()
        return grads

    return step


def check_unused(wrapper: str, mode: str, factor: float) -> None:
    """What nobody used stays, what has a gradient of zeros decays; nobody calls step() of the overlapped."""
    setting = Setting(wrapper, options={mode: True})
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    for number in range(3):
        uses_spare = number == 1 and mode == "find_unused_parameters"
        for net, optimizer in ((plain, one), (model, other)):
            optimizer.zero_grad()
            (net(inputs(number), uses_spare).square().mean() * factor).backward()
        one.step()
        assert_same_params(model, plain, (mode, factor, number))


@on_ranks(2)
@either_way
@both_wrappers
@pytest.mark.parametrize("mode", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_left_alone_without_step(wrapper: str, inline: bool, mode: str) -> None:
    for factor in (0.0, 1.0):
        run_either_way(inline, check_unused, wrapper, mode, factor)


# ---------------------------------------------------------------------- Join


def check_uneven(wrapper: str, first_is_longest: bool) -> None:
    """Gradients are zeros, which a rank that has joined cannot see; a scheduler runs on the active ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    runs = [Setting(wrapper).build(overlap) for overlap in (False, True)]
    for model, optimizer in runs:
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
        with Join([model, optimizer]):  # type: ignore[list-item]
            for number in range(2 + (size - 1 - rank if first_is_longest else rank)):
                optimizer.zero_grad()
                (loss_of(model, number) * 0.0).backward()
                optimizer.step()
                schedule.step()
    (plain, one), (model, other) = runs
    assert_same_params(model, plain)
    assert_same_state(whole(other), whole(one))


@on_ranks(2, slow=4)
@either_way
@both_wrappers
@pytest.mark.parametrize("first_is_longest", [True, False])
def test_uneven_inputs_give_the_same_bits(wrapper: str, inline: bool, first_is_longest: bool) -> None:
    run_either_way(inline, check_uneven, wrapper, first_is_longest)


def clip(optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.clip_grad_norm_(0.1)


def step_with_changed_gradients(optimizer: ZeroRedundancyOptimizer) -> None:
    for param in optimizer.owned_parameters():
        assert param.grad is not None
        param.grad.mul_(2)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(
    ("does_wrong", "message"),
    [(clip, "too early to clip"), (step_with_changed_gradients, "gradients were changed")],
)
def test_what_comes_too_late_inside_join_raises_on_joined_ranks_too(
    does_wrong: Callable[[ZeroRedundancyOptimizer], None], message: str
) -> None:
    """What comes too late is done when another rank has joined, which waits for a step."""
    model, optimizer = Setting("ours").build(overlap=True)

    def train() -> None:
        with Join([model, optimizer]):
            for number in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                if number == 1:
                    does_wrong(optimizer)
                optimizer.step()

    with pytest.raises(RuntimeError, match=message):
        train()


# ---------------------------------------------------------------------- a last bucket that is left out


class Gated(Net):
    """The convolution, whose bucket is the last, is left out where ``with_spare`` is False."""

    def forward(self, x: Tensor, with_spare: bool = False) -> Tensor:
        if with_spare:
            return super().forward(x)
        out: Tensor = self.head(self.layers(x.flatten(1).repeat(1, 2)))
        return out


LEAVES_OUT = {**MAY_BE_UNUSED, "skip_all_reduce_unused_params": True}


@on_ranks(2)
@either_way
def test_a_last_bucket_that_nobody_used_may_be_left_out(inline: bool) -> None:
    step = step_with(lambda step, rank: step % 2 == 0)
    run_either_way(inline, assert_same_run, Setting("ours", Gated, options=LEAVES_OUT), step, 4, False)


def check_joined_and_left_out() -> None:
    runs = [Setting("ours", Gated, options=LEAVES_OUT).build(overlap) for overlap in (False, True)]
    overlap, open_parts = runs[1][1].iteration.overlap(), list[int]()
    rest = OverlappedStep.rest

    def noted(self: OverlappedStep, groups: Any) -> list[Tensor]:
        open_parts.append(len(overlap.under_way))
        return rest(self, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedStep, "rest", noted)
        for model, optimizer in runs:
            with Join([model, optimizer]):  # type: ignore[list-item]
                for number in range(2 + 2 * dist.get_rank()):
                    optimizer.zero_grad()
                    loss_of(model, number).backward()
                    optimizer.step()
    assert set(open_parts) == {0}, "something was stepped still when the rest was looked for"
    assert_same_params(runs[1][0], runs[0][0], "joined")


@on_ranks(2)
@either_way
def test_a_joined_rank_steps_all_where_the_last_bucket_is_left_out(inline: bool) -> None:
    run_either_way(inline, check_joined_and_left_out)


@on_ranks(2)
def test_a_step_that_begins_with_the_last_bucket_needs_a_wrapper_that_reduces_it() -> None:
    model = WRAPPERS["ours"](Net(), **LEAVES_OUT)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        hook_with_zero_step(allreduce_hook, model, optimizer)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        zero_step(optimizer, ddp=model, interleave=False)
    hook_with_zero_step_interleaved(allreduce_hook, model, optimizer)
