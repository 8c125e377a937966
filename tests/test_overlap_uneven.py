"""Unused parameters, sparse gradients and uneven inputs, with the step taken during the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler

from fake_streams import fake_streams
from overlap import (
    WRAPPERS,
    Embedder,
    Grads,
    Net,
    Setting,
    assert_same_params,
    assert_same_run,
    grads_of,
    inputs,
    loss_of,
    step_tokens,
)
from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import (
    allreduce_hook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    zero_step,
)
from zero_optim.iteration.overlap import OverlappedStep

both_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def step_with(
    use: Callable[[int, int], bool], set_to_none: bool = True, factor: float = 1.0
) -> Callable[..., Grads]:
    """A step in which ``use(step, rank)`` says whether this rank uses the spare layer."""

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Grads:
        optimizer.zero_grad(set_to_none=set_to_none)
        output: Tensor = model(inputs(number), use(number, dist.get_rank()))
        (output.square().mean() * factor).backward()
        grads = grads_of(model)
        optimizer.step()
        return grads

    return step


UNUSED: dict[str, Callable[..., Grads]] = {
    "never": step_with(lambda step, rank: False),
    "on rank 0 only": step_with(lambda step, rank: rank == 0),
    "by turns": step_with(lambda step, rank: step % 3 == rank),
    "now and then": step_with(lambda step, rank: step % 2 == 0),
    "now and then, gradients zeroed": step_with(lambda step, rank: step % 2 == 0, set_to_none=False),
    "always, with a gradient of zero": step_with(lambda step, rank: True, factor=0.0),
}


def check_unused(wrapper: str, mode: str, as_view: bool) -> None:
    for name, step in UNUSED.items():
        if mode == "static_graph" and name not in ("never", "always, with a gradient of zero"):
            continue
        options = {mode: True, "gradient_as_bucket_view": as_view}
        for interleave in (True, False):
            setting = Setting(wrapper, options=options, zero={"interleave": interleave})
            model, _ = assert_same_run(setting, step, 6, moves=False, where=(name, mode, interleave))
            if name == "never":
                untouched = Net().spare.weight
                assert torch.equal(model.module.spare.weight, untouched)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("mode", ["find_unused_parameters", "static_graph"])
@both_wrappers
def test_unused_parameters_are_left_alone_bit_for_bit(
    ranks2: Ranks, wrapper: str, mode: str, as_view: bool
) -> None:
    ranks2.run(check_unused, wrapper, mode, as_view)


@on_ranks(2)
@both_wrappers
def test_unused_parameters_are_left_alone_without_step(wrapper: str) -> None:
    """A loop without step(): what nobody used stays, what has a gradient of zeros decays."""
    for factor in (0.0, 1.0):
        setting = Setting(wrapper, options={"find_unused_parameters": True})
        (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
        for number in range(5):
            for net, optimizer in ((plain, one), (model, other)):
                optimizer.zero_grad()
                (net(inputs(number), number == 1).square().mean() * factor).backward()
            one.step()
            assert_same_params(model, plain, (factor, number))


def sgd(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)


def sparse_adam_and_adamw(model: Any) -> ZeroRedundancyOptimizer:
    table = model.module.table.weight
    groups = [
        {"params": [table], "optimizer_class": torch.optim.SparseAdam, "lr": 0.05},
        {"params": [param for param in model.parameters() if param is not table]},
    ]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)


def check_sparse(wrapper: str) -> None:
    for optimizer in (sgd, sparse_adam_and_adamw):
        assert_same_run(Setting(wrapper, Embedder, optimizer), step_tokens, 10, moves=False, where=optimizer)


@both_wrappers
def test_sparse_gradients_give_the_same_bits(ranks: Ranks, wrapper: str) -> None:
    ranks.run(check_sparse, wrapper)


# ---------------------------------------------------------------------- Join


def check_uneven(wrapper: str, order: str, options: dict[str, Any], factor: float, **zero: Any) -> None:
    """Rank r has 2 + r batches, or the other way round; a scheduler runs on the active ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = range(2, 2 + size) if order == "last longest" else range(1 + size, 1, -1)
    setting = Setting(wrapper, options=options, zero=zero)
    runs = [setting.build(overlap) for overlap in (False, True)]
    for model, optimizer in runs:
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
        with Join([model, optimizer]):
            for number in range(counts[rank]):
                optimizer.zero_grad()
                (loss_of(model, number) * factor).backward()
                optimizer.step()
                schedule.step()
    (plain, one), (model, other) = runs
    assert_same_params(model, plain, (order, options, factor))
    for optimizer in (one, other):
        optimizer.consolidate_state_dict(to=None)
    state, expected = other.state_dict()["state"], one.state_dict()["state"]
    assert state.keys() == expected.keys()
    for index, entries in expected.items():
        assert all(torch.equal(state[index][key], value) for key, value in entries.items()), index


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


@on_ranks(2, slow=4)
@both_wrappers
def test_uneven_inputs_give_the_same_bits(wrapper: str) -> None:
    for order in ("last longest", "first longest"):
        check_uneven(wrapper, order, {}, 1.0)
        check_uneven(wrapper, order, {"gradient_as_bucket_view": True}, 1.0)
        check_uneven(wrapper, order, {}, 0.0)  # gradients of zero, which a rank that has joined cannot see
        check_uneven(wrapper, order, {"find_unused_parameters": True}, 1.0)
        if dist.get_world_size() == 2:  # with more the sums are taken in another order
            check_uneven(wrapper, order, {}, 1.0, gradients="owners")


@on_ranks(2)
@both_wrappers
def test_training_goes_on_after_uneven_inputs(wrapper: str) -> None:
    """The loop after the context goes on as ever, from equal parameters and equal options."""
    setting = Setting(wrapper)
    runs = [setting.build(overlap) for overlap in (False, True)]
    for model, optimizer in runs:
        with Join([model, optimizer]):
            for number in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                optimizer.step()
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, 10 + number).backward()
            optimizer.step()
    assert_same_params(runs[1][0], runs[0][0])


class Gated(Net):
    """The convolution, whose bucket is the last, is never used."""

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        out: Tensor = self.head(self.layers(x.flatten(1).repeat(1, 2)))
        return out


@on_ranks(2)
@pytest.mark.parametrize("inline", [False, True], ids=["thread", "inline"])
def test_a_joined_rank_steps_all_where_the_last_bucket_is_left_out(inline: bool) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    with fake_streams() if inline else nullcontext():
        runs = [Setting("ours", Gated, options=options).build(overlap) for overlap in (False, True)]
        overlap, open_parts = runs[1][1].iteration.overlap(), []
        rest = OverlappedStep.rest

        def noted(self: OverlappedStep, groups: Any) -> list[Tensor]:
            open_parts.extend(overlap._announced)
            return rest(self, groups)

        OverlappedStep.rest = noted  # type: ignore[method-assign]
        try:
            for model, optimizer in runs:
                with Join([model, optimizer]):  # type: ignore[list-item]
                    for number in range(2 + 2 * dist.get_rank()):
                        optimizer.zero_grad()
                        loss_of(model, number).backward()
                        optimizer.step()
        finally:
            OverlappedStep.rest = rest  # type: ignore[method-assign]
        assert not open_parts, "something was stepped still when the rest was looked for"
        assert_same_params(runs[1][0], runs[0][0], "joined")


@on_ranks(2)
def test_a_step_that_begins_with_the_last_bucket_needs_a_wrapper_that_reduces_it() -> None:
    skips = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = WRAPPERS["ours"](Net(), **skips)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        hook_with_zero_step(allreduce_hook, model, optimizer)
    with pytest.raises(ValueError, match="may leave out the last bucket"):
        zero_step(optimizer, ddp=model, interleave=False)
    hook_with_zero_step_interleaved(allreduce_hook, model, optimizer)
