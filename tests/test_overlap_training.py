"""Training loops of all kinds give the same bits with the step taken during the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import lr_scheduler

from fake_streams import fake_streams
from overlap import (
    BUCKET_CAP_MB,
    WRAPPERS,
    Grads,
    Net,
    Setting,
    adamw,
    assert_same_params,
    assert_same_run,
    both_wrappers,
    either_way,
    grads_of,
    loss_of,
    plain_step,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step


def freezing(model: Any, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    """What DDP was built without begins to train later: each rank gives it the same gradients."""
    frozen: nn.Parameter = model.module.layers[0].weight
    optimizer.zero_grad()
    frozen.requires_grad_(step >= 3)
    loss_of(model, step).backward()
    if frozen.grad is not None:
        dist.all_reduce(frozen.grad)
    grads = grads_of(model)
    optimizer.step()
    return grads


def frozen_net() -> nn.Module:
    net = Net()
    net.layers[0].weight.requires_grad_(False)
    return net


def kept_frozen(model: Any, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    """A parameter that was frozen with its gradient still there moves on, as in torch.optim."""
    frozen: nn.Parameter = model.module.layers[0].weight
    if frozen.grad is None:
        frozen.grad = torch.ones_like(frozen)
    model.module.layers[0].bias.grad = None
    loss_of(model, step).backward()
    optimizer.step()
    for param in model.parameters():
        if param is not frozen:
            param.grad = None
    return grads_of(model)


LOOPS: dict[str, tuple[dict[str, Any], Callable[..., Grads]]] = {
    "unfreezing": ({"model": frozen_net}, freezing),
    "frozen with a gradient": ({"model": frozen_net}, kept_frozen),
}


@on_ranks(2)
@both_wrappers
def test_loops_that_the_table_of_parity_does_not_have_give_the_same_bits(wrapper: str) -> None:
    for name, (arguments, step) in LOOPS.items():
        for likewise in (nullcontext, fake_streams):
            with likewise():
                assert_same_run(Setting(wrapper, **arguments), step, 6, moves=False, where=name)


def check_no_step(wrapper: str, interleave: bool) -> None:
    """PyTorch's idiom for overlap: nobody calls step()."""
    setting = Setting(wrapper, zero={"interleave": interleave})
    plain, one = setting.build(overlap=False)
    model, other = setting.build(overlap=True)
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (one, other)]
    for number in range(5):
        plain_step(plain, one, number)
        model.zero_grad()
        loss_of(model, number).backward()
        assert_same_params(model, plain, number)
        for schedule in schedules:
            schedule.step()


@on_ranks(2)
@either_way
@both_wrappers
def test_a_loop_that_never_calls_step_trains(wrapper: str, inline: bool) -> None:
    check_no_step(wrapper, wrapper == "ours")


@on_ranks(2)
@both_wrappers
def test_the_names_that_pytorch_uses_give_the_same_bits(wrapper: str) -> None:
    expected, one = Setting(wrapper).build(overlap=False)
    runs = []
    for make_hook, shard_buckets in ((hook_with_zero_step, False), (hook_with_zero_step_interleaved, True)):
        model = WRAPPERS[wrapper](Net(), bucket_cap_mb=BUCKET_CAP_MB)
        optimizer = adamw(model, overlap_with_ddp=True)
        model.register_comm_hook(None, make_hook(allreduce_hook, model, optimizer, shard_buckets))
        runs.append((model, optimizer))
    for number in range(4):
        plain_step(expected, one, number)
        for model, optimizer in runs:
            plain_step(model, optimizer, number)
            assert_same_params(model, expected, number)


@on_ranks(2)
def test_wrong_use_is_refused_saying_why() -> None:
    model = WRAPPERS["torch"](Net(), bucket_cap_mb=BUCKET_CAP_MB)
    import torch_optimizer  # the GPU suite names tests of this module, and does without it

    with pytest.raises(ValueError, match="MADGRAD cannot be stepped during"):
        ZeroRedundancyOptimizer(model.parameters(), torch_optimizer.MADGRAD, overlap_with_ddp=True)
    optimizer = adamw(model, overlap_with_ddp=True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="overlap_with_ddp=True, but no step was taken"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"expected a zero_optim\.ZeroRedundancyOptimizer, got AdamW"):
        zero_step(torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]


@on_ranks(4)
def test_sub_groups_give_the_same_bits() -> None:
    """Two pairs train models of their own; then DDP over all four, sharded within pairs."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = pairs[rank % 2]
    for group in (pair, None):
        setting = Setting(
            "ours",
            optimizer=lambda m: adamw(m, process_group=pair),
            options={"process_group": group},
            hook=lambda group=group: (group, allreduce_hook),  # type: ignore[misc]
        )
        assert_same_run(setting, steps=4, where=group)
