"""Process groups beside the one that is trained on: lent, taken over, and never one more than is needed."""

import errno
import gc
import os
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from overlap import Setting, assert_same_run, plain_step
from parity_runs import STAGES, Row, Run, Stage
from pool import Ranks, on_ranks
from stalling import about_to_stall, outcomes
from training import TORCH
from waiting import LIMIT, wait_until
from zero_optim import RemoteRankError
from zero_optim.comm import hosts
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside, lease
from zero_optim.compat.autograd import timeout_of
from zero_optim.health.watchdog import watching

set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # which warns from PyTorch 2.14 on
MOST_LANES = 18  # those made freely, and two more of the last user
THREADS_OF_A_LANE, DESCRIPTORS_OF_A_LANE = 3, 5  # on gloo with two ranks


def num_threads_and_descriptors() -> tuple[int, int]:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "zero_step":  # its stepper is gone, so it ends
            thread.join(LIMIT)
    threads, descriptors = (list(Path("/proc/self", kind).iterdir()) for kind in ("task", "fd"))
    return len(threads), len(descriptors)


def build_train_and_drop(stage: Stage) -> None:
    """Build a run with gradients to owners, and take a step."""
    run = Run.of(Row("", "tower", "ordinary", "plain"), stage)
    run.loss(0).backward()
    run.optimizer.step()


@on_ranks(2)
def test_building_again_and_again_takes_no_more_threads_and_descriptors() -> None:
    """Optimizers go when garbage is collected; so many lanes are made before it is, and no more."""
    before = num_threads_and_descriptors()
    for _ in range(MOST_LANES):
        build_train_and_drop(STAGES["gradients"])
    # A thread that has been waited for stays in the system's list for a moment.
    wait_until(lambda: num_threads_and_descriptors()[0] - before[0] <= MOST_LANES * THREADS_OF_A_LANE)
    threads, descriptors = (
        now - then for now, then in zip(num_threads_and_descriptors(), before, strict=True)
    )
    assert threads <= MOST_LANES * THREADS_OF_A_LANE, (threads, descriptors)
    assert descriptors <= MOST_LANES * DESCRIPTORS_OF_A_LANE + 8, (threads, descriptors)  # 8 for whatever


@on_ranks(3)
@pytest.mark.parametrize("stage", ["gradients", "fully, wrapped first", "overlap"])
def test_lanes_on_which_gradients_went_to_owners_are_lent_again(stage: str) -> None:
    build_train_and_drop(STAGES[stage])
    gc.collect()
    dist.barrier()  # so every rank has dropped the lanes, and all of them are free for the second build
    num_lanes = len(c10d._world.pg_map)
    before = num_threads_and_descriptors()
    for number in range(5):
        build_train_and_drop(STAGES[stage])
        gc.collect()
        dist.barrier()
        assert len(c10d._world.pg_map) == num_lanes, number
    wait_until(lambda: num_threads_and_descriptors()[0] <= before[0])
    assert num_threads_and_descriptors()[1] <= before[1] + 8  # 8 for whatever


def add_up(lanes: Lease) -> None:
    """Each lane adds up something else, so that lanes paired wrongly would be seen."""
    size = dist.get_world_size()
    for number, lane in enumerate(lanes.groups):
        total = torch.full((3,), float(number))
        dist.all_reduce(total, group=lane.process_group)
        assert torch.equal(total, torch.full((3,), float(number * size))), number


def names_of(lanes: Lease) -> list[str]:
    return [lane.process_group.group_name for lane in lanes.groups]


def check_collected_at_other_times() -> list[list[str]]:
    """Garbage goes on rank 0 at once, on the others after the next lanes were taken."""
    group = RankGroup.of(None)
    told = []
    held: list[Lease] = []
    for _ in range(4):
        lanes = lanes_beside(group)
        told.append(names_of(lanes))
        add_up(lanes)
        if dist.get_rank() > 0:
            held = [*held[-1:], lanes]
        del lanes
    return told


def test_lanes_are_those_free_on_every_rank_whenever_garbage_is_collected(ranks: Ranks) -> None:
    first, *others = ranks.run(check_collected_at_other_times)
    assert all(other == first for other in others)
    one, two, three, four = map(set, first)
    assert not one & two
    assert not two & three
    assert three == one or three.isdisjoint(one)
    assert four <= one | two | three


@on_ranks(2)
def test_lanes_on_which_one_rank_saw_a_failure_are_not_lent_again() -> None:
    group = RankGroup.of(None)
    lanes = lanes_beside(group)
    names = names_of(lanes)
    add_up(lanes)
    del lanes
    lanes = lanes_beside(group)
    assert names_of(lanes) == names
    if dist.get_rank() == 0:
        lanes.abandon()  # it saw something fail, and nobody else did
    del lanes
    lanes = lanes_beside(group)
    assert set(names_of(lanes)).isdisjoint(names)
    add_up(lanes)


@on_ranks(2)
def test_lanes_have_the_timeout_of_the_group_they_lie_beside() -> None:
    for group in (None, dist.new_group(timeout=timedelta(seconds=77))):
        ranks = RankGroup.of(group)
        expected = timeout_of(ranks.process_group)
        assert expected < timedelta(minutes=5)
        for lanes in (lanes_beside(ranks), lease(ranks, 1, "gloo")):
            assert [timeout_of(lane.process_group) for lane in lanes.groups] == [expected] * len(lanes.groups)


@on_ranks(2)
def test_a_rank_that_does_not_come_for_its_lanes_is_told_within_the_timeout() -> None:
    seconds = 1 if TORCH >= (2, 13) else 10
    group = dist.new_group(timeout=timedelta(seconds=10))
    set_timeout(timedelta(seconds=seconds), group)
    if dist.get_rank() == 0:
        with pytest.raises(RemoteRankError, match=f"did not come within {seconds} s"):
            lanes_beside(RankGroup.of(group))
    dist.barrier()


def construct_where_no_group_is_made(failure: str) -> str:
    """Rank 1 fails, or dies, as it makes a group; the others have a timeout, and their group a long one."""

    def fail(*_: object) -> None:
        if failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    group = RankGroup.of(None).within(4.0)
    make_group = fail if group.rank == 1 else hosts.make_group
    about_to_stall()
    with mock.patch.object(hosts, "make_group", make_group), watching(group):
        lease(group, 1, "gloo")
    return "made"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("raises", r"it failed on rank 1 \(\[Errno 24\] Too many open files\)"),
        ("killed", "rank 1 has ended|failed on rank 0 where it waited for a rank that has ended"),
    ],
)
@pytest.mark.skipif(TORCH < (2, 13), reason="groups of before keep the first timeout")
def test_who_fails_to_make_a_group_is_named_within_the_timeout(failure: str, said: str) -> None:
    ended = outcomes(2, construct_where_no_group_is_made, failure, limit=120.0)
    for outcome in ended[: 1 + (failure == "raises")]:
        assert re.search(said, str(outcome.said)), outcome.said


@on_ranks(4)
def test_ranks_may_be_members_of_different_numbers_of_groups() -> None:
    dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    assert_same_run(Setting("ours"), plain_step, 2, moves=False)
    add_up(lanes_beside(RankGroup.of(None)))
