"""The overlapped step as on an accelerator: without a thread, on the process group of the reductions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fake_streams import fake_streams, without_thread
from overlap import (
    Embedder,
    Grads,
    Net,
    Setting,
    adamw,
    assert_same_params,
    assert_same_run,
    both_wrappers,
    inputs,
    loss_of,
    plain_step,
    step_tokens,
)
from pool import Ranks, on_ranks
from test_overlap_errors import assert_trains_on, check_failing_hook, check_failing_step, run_broken_off
from test_overlap_uneven import UNUSED, check_uneven, sgd
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.hooks import allreduce_hook


def check_unused(wrapper: str) -> None:
    cases = [
        ("by turns", "find_unused_parameters"),
        ("never", "find_unused_parameters"),
        ("never", "static_graph"),
    ]
    for name, mode in cases:
        for interleave in (True, False):
            setting = Setting(wrapper, options={mode: True}, zero={"interleave": interleave})
            assert_same_run(setting, UNUSED[name], 5, moves=False, where=(name, mode, interleave))
    assert_same_run(Setting(wrapper, Embedder, sgd), step_tokens, 5, moves=False, where="sparse")


def check_join(wrapper: str) -> None:
    for order in ("last longest", "first longest"):
        for gradients in ("everywhere", "owners"):
            check_uneven(wrapper, order, {}, 1.0, gradients=gradients)
        check_uneven(wrapper, order, {"find_unused_parameters": True}, 1.0)
        check_uneven(wrapper, order, {}, 0.0)


@pytest.mark.parametrize("check", [check_unused, check_join])
@both_wrappers
def test_unused_parameters_and_uneven_inputs_give_the_same_bits(
    ranks2: Ranks, wrapper: str, check: Callable[[str], None]
) -> None:
    ranks2.run(without_thread, check, wrapper)


def lazily(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    optimizer = adamw(model, **options)
    optimizer.gather_lazily(model)
    return optimizer


@on_ranks(2)
@both_wrappers
def test_lazy_gathers_give_the_same_bits(wrapper: str) -> None:
    for as_view in (True, False):
        setting = Setting(
            wrapper,
            optimizer=lambda m, v=as_view: lazily(m, parameters_as_bucket_view=v),  # type: ignore[misc]
        )
        with fake_streams():
            runs = [setting.build(overlap) for overlap in (False, True)]
            for model, optimizer in runs:
                for number in range(5):
                    plain_step(model, optimizer, number)
                optimizer.wait_for_gathers()
            assert_same_params(runs[1][0], runs[0][0], as_view)


@pytest.mark.parametrize("interleave", [True, False])
@both_wrappers
def test_a_step_that_fails_on_one_rank_raises_in_its_backward_pass(
    ranks2: Ranks, wrapper: str, interleave: bool
) -> None:
    ranks2.run(without_thread, check_failing_step, wrapper, interleave, True)


@both_wrappers
def test_a_reduction_that_fails_on_one_rank_raises_in_its_backward_pass(ranks2: Ranks, wrapper: str) -> None:
    ranks2.run(without_thread, check_failing_hook, wrapper, True)


def check_broken_off_late(interleave: bool, waits: bool) -> None:
    """As `check_broken_off`, where DDP tells of a pass only when the second one after it begins."""
    model, optimizer = run_broken_off(interleave)
    messages = []
    for _ in range(4):
        if waits:
            optimizer.wait_for_gathers()
        optimizer.zero_grad()
        try:
            plain_step(model, optimizer, 2)
        except RuntimeError as error:
            messages.append(str(error))
    assert any("ended with an exception" in message for message in messages)
    assert any("the last backward pass broke off" in message for message in messages) or waits
    assert_trains_on(model, optimizer)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("interleave", [True, False])
def test_training_goes_on_after_a_backward_pass_that_broke_off(
    ranks2: Ranks, interleave: bool, waits: bool
) -> None:
    ranks2.run(without_thread, check_broken_off_late, interleave, waits)


# ---------------------------------------------------------------------- what happens when


def traced(trace: list[str], group: list[dist.ProcessGroup]) -> Callable[..., Any]:
    """A hook that notes its reductions; gathers note themselves, with the group that they use."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        trace.append(f"reduce {bucket.index()}")
        return allreduce_hook(None, bucket)

    broadcast_rows = RankGroup.broadcast_rows

    def noted(self: RankGroup, rows: Any, about: str = "") -> Any:
        rows = list(rows)
        if rows:
            trace.append("gather")
            group.append(self.process_group)
        return broadcast_rows(self, rows, about)

    RankGroup.broadcast_rows = noted  # type: ignore[method-assign]
    return hook


@on_ranks(2)
@both_wrappers
def test_each_hook_gathers_the_bucket_before_on_the_group_of_the_reductions(wrapper: str) -> None:
    trace: list[str] = []
    groups: list[dist.ProcessGroup] = []
    before = RankGroup.broadcast_rows
    try:
        with fake_streams():
            hook = traced(trace, groups)
            setting = Setting(wrapper, hook=lambda: (None, hook), options={"bucket_cap_mb": 0.0008})
            model, optimizer = setting.build(overlap=True)
            for number in range(2):  # until the buckets have been rebuilt
                plain_step(model, optimizer, number)
            del trace[:], groups[:]
            loss_of(model, 2).backward()
            order = [kind for number, kind in enumerate(trace) if kind != trace[number - 1] or not number]
            reduced = sum(kind != "gather" for kind in order)
            assert reduced > 2, trace
            expected = ["reduce 0", "reduce 1", "gather"]
            for bucket in range(2, reduced):
                expected += [f"reduce {bucket}", "gather"]
            assert order == expected, trace  # the last two buckets are gathered in the last hook
            assert set(groups) == {dist.group.WORLD}
    finally:
        RankGroup.broadcast_rows = before  # type: ignore[method-assign]


@on_ranks(2)
def test_the_stream_that_steps_waits_for_that_of_backward_and_the_callers_for_it() -> None:
    with fake_streams() as accelerator:
        main = accelerator.stack[0]
        model, optimizer = Setting("ours").build(overlap=True)
        for number in range(2):
            loss = loss_of(model, number)
            accelerator.events.clear()
            main.awaited.clear()
            loss.backward()
            beside = [event for event in accelerator.events if event.stream.name == "beside"]
            assert beside[-1] in main.awaited
            stepping = beside[-1].stream
            assert {event.stream for event in stepping.awaited} == {main}
            optimizer.step()


class Gated(Net):
    """The convolution, whose bucket is the last, is left out at some steps."""

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        if with_spare:
            return super().forward(x)
        hidden = x.flatten(1).repeat(1, 2)
        out: Tensor = self.head(self.layers(hidden))
        return out


def check_left_out() -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Grads:
        optimizer.zero_grad()
        model(inputs(number), number % 2 == 0).square().mean().backward()
        optimizer.step()
        return []

    (plain, one), (model, other) = (
        Setting("ours", Gated, options=options).build(overlap) for overlap in (False, True)
    )
    for number in range(5):
        step(plain, one, number)
        step(model, other, number)
        assert_same_params(model, plain, number)


def test_a_last_bucket_that_nobody_used_may_be_left_out(ranks2: Ranks) -> None:
    ranks2.run(without_thread, check_left_out)
