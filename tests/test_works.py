"""Works: what each process keeps of the collectives of the library, and of what it does."""

import gc
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from pool import Ranks, on_ranks
from stalling import begun_works, linear
from waiting import wait_until
from worlds import enter, leave
from zero_optim import StalledError, ZeroRedundancyOptimizer, share_host_memory
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import host_lanes_beside
from zero_optim.comm.records import OVERLAPPED_STEP, Activity, Verdict
from zero_optim.comm.works import Work
from zero_optim.compat.engine import default_store
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.ddp.reducer.gradient_bucket import GradBucket
from zero_optim.health.diagnosis import Status, judge
from zero_optim.health.peers import Presence


def trained() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = linear()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, bucket_cap_mb=1e-4)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.consolidate_state_dict()
    return model, optimizer


def record_works() -> list[str]:
    """Check what is kept of a run, and return the names of its works."""
    with begun_works() as works:
        _kept = trained()
    assert {work.phase.name for work in works} >= {"agree", "reduce", "clip", "gather", "state"}
    texts = {work.text for work in works if work.phase.name in ("gather", "reduce")}
    assert "the gather of bucket 0 (0.weight)" in texts, texts
    assert any(text.startswith("the reduction of bucket 0 (") for text in texts), texts
    group = RankGroup.of(None).works
    assert not group.log.waits()
    assert not any(each.pending for each in group.log.groups.values())
    activity = group.log.activity
    assert not activity.open
    assert activity.last is not None
    assert (activity.last.name, activity.last.is_over) == ("consolidate_state_dict()", True)
    calls = ["clip_grad_norm_()", "step()", "consolidate_state_dict()", "forward pass", "backward pass"]
    built = ["ZeroRedundancyOptimizer()", "DistributedDataParallel()"]
    assert activity.counts == dict.fromkeys(calls + built, 1)
    # The state is sent from rank to rank, so what begins behind it differs.
    return [each.text for each in works if each.group is group][:12]


def test_calls_and_passes_are_counted_and_works_named_alike_on_every_rank(ranks2: Ranks) -> None:
    first, second = ranks2.run(record_works)
    assert first == second
    assert len(first) == 12


@on_ranks(2)
def test_nothing_keeps_a_tensor_of_a_work_that_has_ended() -> None:
    group = RankGroup.of(None)
    tensor = torch.full((4,), float(dist.get_rank()))
    seen = weakref.ref(tensor)
    (work,) = group.within(100.0).broadcast_rows([(1, tensor)], "a tensor")
    assert isinstance(work, Work)
    assert group.works.pending == {work}
    assert isinstance(work.wait(), bool)
    assert (work.text, work.timeout) == ("an agreement of a tensor", 100.0)
    assert torch.equal(tensor, torch.ones(4))
    del tensor, work
    gc.collect()
    assert seen() is None


@on_ranks(2)
def test_a_work_tells_whether_it_is_over_to_whoever_does_not_wait() -> None:
    """A work is asked for its state, and never waited for."""
    group, store = RankGroup.of(None), default_store()
    (work,) = group.broadcast_rows([(1, torch.ones(4))]) if dist.get_rank() == 0 else [None]
    assert isinstance(work, Work | None)
    if work is None:
        wait_until(lambda: store.check(["asked"]))
        (work,) = group.broadcast_rows([(1, torch.ones(4))])
        assert isinstance(work, Work)
    else:
        assert (work.is_completed(), work.exception()) == (False, None)
        store.set("asked", "")
    wait_until(work.is_completed)
    assert work.exception() is None


@on_ranks(2, forked=True)
def test_a_work_gives_what_it_failed_with_and_the_reason_if_that_is_known() -> None:
    group = RankGroup.of(dist.new_group())
    (work,) = group.broadcast_rows([(1, torch.ones(4))]) if dist.get_rank() == 0 else [None]
    if work is None:
        group.works.cut()
        return
    assert isinstance(work, Work)
    wait_until(work.is_completed)
    failure = work.exception()
    assert isinstance(failure, RuntimeError)
    assert failure.__traceback__ is None
    assert work in group.works.pending
    group.works.log.give_up(group.works.ranks, Verdict("rank 1 is away", (1,)))
    assert str(work.exception()) == "rank 1 is away"


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


@on_ranks(1)
def test_a_work_that_is_a_future_tells_its_state_likewise() -> None:
    group = RankGroup.of(None)
    future: Future[Any] = Future()
    work = group.begin_work().take(future)
    assert (work.is_completed(), work.exception()) == (False, None)
    future.set_exception(ValueError("not a sum"))  # type: ignore[arg-type]
    assert work.is_completed()
    assert "not a sum" in str(work.exception())


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


@on_ranks(2)
def test_who_detaches_a_wrapper_alone_after_a_failure_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """Rank 0 leaves after a failure; it keeps what was raised, and so the groups. Rank 1 waits for it."""
    rank = leave()
    enter(tmp_path, "the group", rank, 2)
    model = DistributedDataParallel(linear())
    beside = RankGroup.of(dist.new_group())  # of the same ranks
    if rank == 0:
        wait_until((tmp_path / "connected").exists)
        RankGroup.of(None).works.has_failed = True
        model.detach()
        wait_until((tmp_path / "raised").exists)
    else:
        (tmp_path / "connected").touch()
        with pytest.raises(RuntimeError):
            beside.broadcast_rows([(0, torch.ones(4))])[0].wait()
        (tmp_path / "raised").touch()
        model.detach()
    dist.destroy_process_group()


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


# ---------------------------------------------------------------------- verdicts


def status(*waits: str, inside: tuple[str, int] | None = None, last: str = "", **counts: int) -> Status:
    return Status(waits, () if inside is None else (inside,), counts, last)


STEPPED = {"step()": 8}
IN_STEP = status("an agreement", inside=("step()", 8))
AGREES = status("an agreement")
WAITS = status("the gather of bucket 3 (a.weight, …)", inside=("step()", 8))
AWAY = Status((), (), {"step()": 7}, "backward pass 812 ended 34 s ago")
STEPPING = status("the gather of bucket 0 (a)", **{"step()": 3, "backward pass": 3})
BEHIND = status("the reduction of bucket 0 (a)", **{"step()": 2, "backward pass": 4})
BUSY = Status(
    ("the reduction of bucket 0 (a)",),
    (("backward pass", 3), (OVERLAPPED_STEP, 9)),
    {"backward pass": 3, OVERLAPPED_STEP: 9},
)


@pytest.mark.parametrize(
    ("seen", "missing", "said"),
    [
        ((IN_STEP, Presence.ENDED), (1,), "rank 1 has ended"),
        ((IN_STEP, Presence.LEFT), (1,), "rank 1 has let go of its optimizers, or has exited"),
        ((IN_STEP, Presence.SILENT), (1,), "rank 1 does not answer: its process is stopped"),
        ((IN_STEP, Presence.ABSENT), (1,), "rank 1 has built no optimizer"),
        ((IN_STEP, Presence.UNKNOWN), (1,), "rank 1 could not be asked"),
        (
            (IN_STEP, status(inside=("step()", 8), **STEPPED)),
            (1,),
            "rank 1 is in step() and waits for nothing",
        ),
        ((IN_STEP, status(**STEPPED)), (1,), "rank 1 has left step()"),
        (
            (AGREES, status(inside=("step()", 8), **STEPPED)),
            (1,),
            "rank 1 is in step() and waits for nothing",
        ),
        ((AGREES, status(**STEPPED)), (1,), "rank 1 waits for nothing"),
        (
            (WAITS, AWAY, WAITS, WAITS),
            (1,),
            (
                "stalled for 1 s: rank 1 has not called step() (last seen: backward pass 812 ended "
                "34 s ago); "
                "ranks 0, 2, 3 wait in the gather of bucket 3 (a.weight, …). "
            ),
        ),
        (
            (AGREES, Presence.ENDED, status(), Presence.SILENT),  # nobody else is blamed
            (1,),
            "stalled for 1 s: rank 1 has ended: nothing listens at its address any more; rank 0 waits",
        ),
        (
            (AGREES, status("the gather of bucket 0 (a)")),
            (),
            "not for the same; rank 0 waits in an agreement; rank 1 waits in the gather of bucket 0",
        ),
        ((AGREES, AGREES), (), "every rank waits, all for the same; ranks 0, 1 wait in an agreement"),
        (
            (STEPPING, STEPPING, BEHIND),
            (),
            (
                "; times of backward pass: 3 on ranks 0, 1 and 4 on rank 2; "
                "times of step(): 3 on ranks 0, 1 and 2 on rank 2. "
            ),
        ),
        # One of its threads waits for another one, which steps.
        (
            (status("an agreement", inside=("backward pass", 3)), BUSY),
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


def test_a_wait_that_failed_early_is_told_without_seconds() -> None:
    assert judge({0: AGREES, 1: Presence.ENDED}, 0, None).message.startswith("stalled: rank 1 has ended")


def test_what_a_process_says_of_itself_survives_the_way_through_json() -> None:
    activity = Activity()
    activity.begin("step()")
    told = Status.of((), [], activity, Verdict("why", (1,)), is_deciding=True)
    assert Status(**asdict(told)) == told
    assert told.last == "step() 1 began 0 s ago"
