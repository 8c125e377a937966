"""Works: what each process keeps of the collectives of the library, and of what it does."""

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pool import on_ranks
from stalling import linear
from waiting import wait_until
from worlds import enter, leave
from zero_optim import StalledError, ZeroRedundancyOptimizer, share_host_memory
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import host_lanes_beside
from zero_optim.comm.work_log import OVERLAPPED_STEP, Verdict
from zero_optim.comm.works import Work
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.ddp.reducer.gradient_bucket import GradBucket
from zero_optim.health.diagnosis import Status, judge


@on_ranks(2)
def test_nothing_keeps_a_tensor_of_a_work_that_has_ended() -> None:
    group = RankGroup.of(None)
    tensor = torch.full((4,), float(dist.get_rank()))
    seen = weakref.ref(tensor)
    (work,) = group.within(100.0).broadcast_rows([(1, tensor)], "a tensor")
    assert isinstance(work, Work)
    assert group.works.pending == {work}
    assert isinstance(work.wait(), bool)
    assert (work.text, work.timeout) == ("an exchange between all ranks of a tensor", 100.0)
    assert torch.equal(tensor, torch.ones(4))
    del tensor, work
    gc.collect()
    assert seen() is None


@on_ranks(1)
def test_one_number_or_a_pair_of_them_limits_waits() -> None:
    group = RankGroup.of(None)
    whole = group.works.limit
    limits = {None: (whole, 60), 9.0: (9, 9), (None, 5): (whole, 5), (9.0, 5): (9, 5)}
    for timeout, expected in limits.items():
        work = group.within(timeout).begin_work()
        assert (work.timeout, work.phase.limits(0.0)[1]) == expected


@on_ranks(2)
def test_works_that_ended_well_are_not_kept_for_ever() -> None:
    """Their tensors were kept as long as the group, where nobody waited, as for a model that was dropped."""
    group = RankGroup.of(None)
    for number in range(12):
        (work,) = group.broadcast_rows([(0, torch.ones(4))], f"bucket {number}")
        assert isinstance(work, Work)
        wait_until(work.is_completed)
        assert len(group.works.pending) <= 4
    assert work in group.works.pending


@on_ranks(2)
def test_no_work_begins_on_ranks_that_were_given_up() -> None:
    group = RankGroup.of(None)
    other = RankGroup.of(dist.new_group())
    group.works.log.give_up(group.works.ranks, Verdict("rank 1 is away", (1,)))
    group.works.log.give_up(group.works.ranks, Verdict("another", ()))
    for each in (group, other, RankGroup.of(dist.new_group())):  # all have the same ranks
        with pytest.raises(StalledError, match="rank 1 is away") as caught:
            each.all_gather_fixed(b"x")
        assert caught.value.missing == (1,)


@on_ranks(2)
def test_who_lets_go_after_a_failure_is_waited_for_by_nobody_and_keeps_no_group(tmp_path: Path) -> None:
    """Rank 0 leaves after a failure of which nobody has died; rank 1 waits for it on another lane."""
    rank = leave()
    enter(tmp_path, "the group", rank, 2)
    share_host_memory(False)  # which needs one lane
    optimizer = ZeroRedundancyOptimizer(linear().parameters(), torch.optim.Adam)
    lanes = host_lanes_beside(RankGroup.of(None)).groups
    seen = [works.group for works in lanes[0].works.log.groups.values()]
    if rank == 1:
        lanes[0].works.cut()
    gc.disable()
    try:
        (work,) = lanes[rank].broadcast_rows([(1 - rank, torch.ones(4))])
        with suppress(RuntimeError):
            work.wait()
            raise AssertionError("something was sent")
        optimizer.detach()
        if rank == 0:
            wait_until((tmp_path / "raised").exists)  # while the lanes are kept
        else:
            (tmp_path / "raised").touch()
        lanes = ()
        del work
        dist.destroy_process_group()
        assert [group() for group in seen] == [None] * len(seen)
    finally:
        gc.enable()


def fail_in_a_future(future: Future[Any]) -> Tensor:
    future.wait()
    raise RuntimeError("the reset of my connection timed out")


@on_ranks(2)
@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_a_comm_hook_raises_is_told_as_the_cause_where_its_group_was_given_up(is_given_up: bool) -> None:
    """Else it is left alone, whatever it reads like."""

    def hook(when: str, bucket: GradBucket) -> Future[Tensor]:
        if is_given_up:
            works.log.give_up(works.ranks, Verdict("rank 1 is away", (1,)))
        future: Future[Any] = Future()
        future.set_result(bucket.buffer())
        if when == "at once":
            fail_in_a_future(future)
        return future.then(fail_in_a_future)

    works = RankGroup.of(None).works
    for when in ("at once", "later"):
        works.log.verdicts.clear()
        works.verdict = None
        wrapped = DistributedDataParallel(linear())
        wrapped.register_comm_hook(when, hook)
        works.log.explain = lambda _work, _error: Verdict("rank 1 is away").error()
        loss = wrapped(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        raised = caught.value.__cause__ if is_given_up else caught.value
        assert "the reset of my connection timed out" in str(raised), when
        assert isinstance(caught.value, StalledError) == is_given_up, when


@on_ranks(2)
def test_a_profiler_sees_the_works_by_name() -> None:
    model = linear()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam)
    wrapped = ShardedDataParallel(model, optimizer)
    with torch.profiler.profile() as profiler:
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    names = {event.name for event in profiler.events() if event.name.startswith("zero_optim.")}
    assert {"zero_optim.gather bucket 0", "zero_optim.gather bucket 0 wait"} <= names
    assert {"zero_optim.reduce bucket 0", "zero_optim.reduce bucket 0 wait"} <= names


def status(*waits: str, inside: tuple[str, int] | None = None, last: str = "", **counts: int) -> Status:
    return Status(waits, () if inside is None else (inside,), counts, last)


STEPPED = {"step()": 8}
IN_STEP = status("an exchange between all ranks", inside=("step()", 8))
AGREES = status("an exchange between all ranks")
BUSY = Status(
    ("the reduction of bucket 0 (a)",),
    (("backward pass", 3), (OVERLAPPED_STEP, 9)),
    {"backward pass": 3, OVERLAPPED_STEP: 9},
)


@pytest.mark.parametrize(
    ("seen", "missing", "said"),
    [
        (
            (IN_STEP, status(inside=("step()", 8), **STEPPED)),
            (1,),
            "rank 1 is in step() and waits for nothing",
        ),
        (
            (AGREES, AGREES),
            (),
            "every rank waits, all for the same; ranks 0, 1 wait in an exchange between all ranks",
        ),
        # One of its threads waits for another one, which steps.
        (
            (status("an exchange between all ranks", inside=("backward pass", 3)), BUSY),
            (1,),
            "rank 1 is in an overlapped step and waits for nothing",
        ),
    ],
)
def test_a_verdict_tells_who_is_missing_and_what_the_others_wait_for(
    seen: tuple[Any, ...], missing: tuple[int, ...], said: str
) -> None:
    told = judge(dict(enumerate(seen)), 0, 1.0)
    assert said in told.message
    assert told.missing == missing
