"""When an overlapped step is taken, gathered and waited for: with a thread, or as on an accelerator."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fake_streams import FakeEvent, FakeStream, fake_streams
from overlap import (
    WRAPPERS,
    Setting,
    assert_same_params,
    both_wrappers,
    either_way,
    inputs,
    loss_of,
    plain_step,
    run_either_way,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.hooks import passes, zero_step


def traced(trace: list[str], groups: list[dist.ProcessGroup]) -> tuple[Callable[..., Any], Any]:
    """A hook that notes its reductions, and what notes gathers with the group that they use."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        trace.append(f"reduce {bucket.index()}")
        return allreduce_hook(None, bucket)

    broadcast_rows = RankGroup.broadcast_rows

    def noted(self: RankGroup, rows: Any, about: str = "") -> Any:
        rows = list(rows)
        if rows:
            trace.append("gather")
            groups.append(self.process_group)
        return broadcast_rows(self, rows, about)

    return hook, noted


@on_ranks(2)
@both_wrappers
def test_each_hook_gathers_the_bucket_before_on_the_group_of_the_reductions(wrapper: str) -> None:
    trace: list[str] = []
    groups: list[dist.ProcessGroup] = []
    hook, noted = traced(trace, groups)
    with fake_streams(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "broadcast_rows", noted)
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
            assert {event.stream for event in beside[-1].stream.awaited} == {main}
            optimizer.step()


class Around(nn.Module):
    """Its backward pass goes through the last layer, another model, then the first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(18, 18), nn.Linear(18, 18)

    def forward(self, x: Tensor, inner: nn.Module) -> Tensor:
        x = x.flatten(1)
        hidden: Tensor = self.first(x)
        out: Tensor = self.last(hidden + inner(x))
        return out


@on_ranks(2)
@either_way
def test_two_hooks_of_one_optimizer_step_in_one_pass(inline: bool) -> None:
    """The optimizer's bucket has layers of both models; the caller waits for what either hook steps."""
    waits: list[tuple[FakeStream, FakeStream]] = []  # who waited for whom

    def wait_event(stream: FakeStream, event: FakeEvent) -> None:
        waits.append((stream, event.stream))

    with (
        fake_streams() if inline else nullcontext() as accelerator,
        mock.patch.object(FakeStream, "wait_event", wait_event),
    ):
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
                loss = outer(inputs(number), inner).square().mean()
                waits.clear()
                loss.backward()
                if accelerator is not None and optimizer is runs[1][1]:
                    main, extra = (
                        accelerator.stack[0],
                        {stream for stream, _ in waits} - {accelerator.stack[0]},
                    )
                    last = {stream: waits[::-1].index((stream, main)) for stream in extra}
                    assert extra
                    assert all(waits[::-1].index((main, stream)) < last[stream] for stream in extra), number
                optimizer.step()
            for plain, model in zip(runs[0][0], runs[1][0], strict=True):
                assert_same_params(model, plain, number)


# ---------------------------------------------------------------------- frozen parameters


class Frozen(nn.Module):
    """A frozen layer in the bucket of a trained one behind it; an earlier one trains, so both are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.frozen, self.late = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.late(self.frozen(self.early(x).tanh()).tanh())
        return y


@on_ranks(2)
@either_way
@pytest.mark.parametrize("as_views", [True, False], ids=["views", "packed"])
@both_wrappers
def test_a_bucket_with_frozen_parameters_is_stepped_when_the_others_are_reduced(
    wrapper: str, as_views: bool, inline: bool
) -> None:
    """The backward pass reads the frozen layer after that, and goes on."""
    run_either_way(inline, check_frozen, wrapper, as_views)


def check_frozen(wrapper: str, as_views: bool) -> None:
    runs = []
    for overlaps in (False, True):
        net = Frozen()
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(),
            torch.optim.SGD,
            lr=0.1,
            bucket_cap_mb=0.0002,  # the last two layers in one bucket
            parameters_as_bucket_view=as_views,
        )
        net.frozen.requires_grad_(False)
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
