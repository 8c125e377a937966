"""The overlapped step as on an accelerator: without a thread, on the process group of the reductions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fake_streams import fake_streams
from overlap import Setting, adamw, assert_same_params, both_wrappers, loss_of, plain_step
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.hooks import allreduce_hook


def lazily(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    optimizer = adamw(model, **options)
    optimizer.gather_lazily(model)
    return optimizer


@on_ranks(2)
@both_wrappers
def test_lazy_gathers_give_the_same_bits(wrapper: str) -> None:
    for as_view in (True, False):
        setting = Setting(wrapper, optimizer=partial(lazily, parameters_as_bucket_view=as_view))
        with fake_streams():
            runs = [setting.build(overlap) for overlap in (False, True)]
            for model, optimizer in runs:
                for number in range(4):
                    plain_step(model, optimizer, number)
                optimizer.wait_for_gathers()
            assert_same_params(runs[1][0], runs[0][0], as_view)


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
