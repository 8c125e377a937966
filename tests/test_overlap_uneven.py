"""Unused parameters and uneven inputs, with the step taken during the backward pass."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

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
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step

MAY_BE_UNUSED = {"find_unused_parameters": True}


def step_using_at_times(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Grads:
    """A step in which the spare layer may be left out."""
    optimizer.zero_grad(set_to_none=number % 4 < 2)
    model(inputs(number), number % 2 == 0).square().mean().backward()
    grads = grads_of(model)
    optimizer.step()
    return grads


@on_ranks(2)
@either_way
@both_wrappers
def test_unused_parameters_are_left_alone_without_step(wrapper: str, inline: bool) -> None:
    """What nobody used stays, what has a gradient of zeros decays; nobody calls step() of the overlapped."""
    for mode, factor in (("find_unused_parameters", 0.0), ("static_graph", 1.0)):
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
def test_clipping_too_late_inside_join_raises_on_joined_ranks_too() -> None:
    """Another rank has joined, and waits for a step."""
    model, optimizer = Setting("ours").build(overlap=True)

    def train() -> None:
        with Join([model, optimizer]):
            for number in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                if number == 1:
                    optimizer.clip_grad_norm_(0.1)
                optimizer.step()

    with pytest.raises(RuntimeError, match="too early to clip"):
        train()


# ---------------------------------------------------------------------- a last bucket that is left out


class Gated(Net):
    """The convolution, whose bucket is the last, is left out where ``with_spare`` is False."""

    def forward(self, x: Tensor, with_spare: bool = False) -> Tensor:
        if with_spare:
            return super().forward(x)
        return self.head(self.layers(x.flatten(1).repeat(1, 2)))


LEAVES_OUT = {**MAY_BE_UNUSED, "skip_all_reduce_unused_params": True}


@on_ranks(2)
@either_way
def test_a_last_bucket_that_nobody_used_may_be_left_out(inline: bool) -> None:
    setting = Setting("ours", Gated, options=LEAVES_OUT)
    assert_same_run(setting, step_using_at_times, 4, moves=False)


@on_ranks(2)
def test_a_step_that_begins_with_the_last_bucket_needs_a_wrapper_that_reduces_it() -> None:
    model = WRAPPERS["ours"](Net(), **LEAVES_OUT)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        hook_with_zero_step(allreduce_hook, model, optimizer)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        zero_step(optimizer, ddp=model, interleave=False)
    hook_with_zero_step_interleaved(allreduce_hook, model, optimizer)
