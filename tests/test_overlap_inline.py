"""The overlapped step as on an accelerator: without a thread, on the process group of the reductions."""

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
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.hooks import zero_step


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
