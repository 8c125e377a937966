"""Ranks of one host send through memory: bits, faults, and when they do not."""

import gc
import os
import re
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_optim
from pool import on_ranks
from processes import stat
from rows import start_sum_of
from stalling import about_to_stall, linear, outcomes, sharded, with_gradients
from training import assert_same_bits
from waiting import wait_until
from worlds import leave, world
from zero_optim.comm import hosts
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.hosts import find_hosts
from zero_optim.comm.lanes import lanes_beside
from zero_optim.compat import private
from zero_optim.host import channel, messages
from zero_optim.host.channel import PIECE, Outgoing
from zero_optim.host.messages import OneHost

# In elements of 4 bytes: of one chunk or several, of a piece and more, more than a ring holds.
LENGTHS = (1, 2, 7, 16, 100, 1000, PIECE // 4, PIECE // 4 + 3, 3 * 2**19 + 5)


def shared() -> tuple[RankGroup, OneHost]:
    """The default group, whose ranks share memory, and its memory."""
    assert zero_optim.share_host_memory()
    group = RankGroup.of(None)
    memory = group.shared_memory(torch.device("cpu"))
    assert isinstance(memory, OneHost)
    return group, memory


def rows_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = [(1000, 0, 70_000, 1, 33)[number % 5] for number in range(size)]
    return [torch.randn(length, generator=generator).to(dtype) for length in lengths]


def test_a_call_that_was_waited_for_keeps_no_tensor() -> None:
    """Also where another thread has moved its last byte, and was not yet told to let go."""
    kept = torch.ones(3)
    held, work = ref(kept), channel.HostWork(mock.Mock(), 0, [kept])
    del kept
    work.wait()
    assert held() is None


# ---------------------------------------------------------------------- bits


@on_ranks(2, 3, slow=4)
def test_a_sum_has_the_bits_of_gloo() -> None:
    group, memory = shared()
    generator = torch.Generator().manual_seed(group.rank)
    for dtype in (torch.float32, torch.float64, torch.complex64):
        for length in LENGTHS:
            mine = torch.randn(length, generator=generator, dtype=dtype)
            expected = mine.clone()
            dist.all_reduce(expected)
            assert messages.can_sum(mine)
            number = memory.num_started
            total = group.start_sum(mine)
            work: Any = total._works[0]
            (call,) = work.handles
            assert total.wait() is mine
            assert memory.num_started == number + 1
            assert sum(group.all_gather_json(call.nbytes)) == 2 * (group.size - 1) * mine.nbytes
            assert torch.equal(mine, expected), (dtype, length)


@on_ranks(2)
def test_what_gloo_rounds_in_its_own_way_goes_through_gloo() -> None:
    group, memory = shared()
    for mine in (torch.ones(5, dtype=torch.int64), torch.ones(5).half()):
        number = memory.num_started
        group.start_sum(mine).wait()
        assert torch.equal(mine, torch.full_like(mine, 2))
        assert memory.num_started == number
        assert not messages.can_sum(mine)


@on_ranks(2)
def test_ranks_whose_strides_differ_go_the_same_way() -> None:
    """As gloo, a sum takes elements as they lie."""
    group, memory = shared()
    for dtype in (torch.float32, torch.complex64):
        results = []
        for number in range(2):
            values = torch.arange(6).to(dtype)
            mine = values.view(2, 3) if group.rank == 0 else values.view(3, 2).t()
            if number == 0:
                dist.all_reduce(mine)
            else:
                group.start_sum(mine).wait()
                group.start_sum(mine[:0]).wait()
            results.append(values)
        assert_same_bits([results[1]], [results[0]])
    assert memory.num_started == 4


@on_ranks(2, 3, slow=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_that_sockets_bring(dtype: torch.dtype) -> None:
    group = RankGroup.of(None)
    results = []
    for in_memory in (False, True):
        assert zero_optim.share_host_memory(in_memory) is in_memory
        lanes = lanes_beside(group)
        rows = rows_of(group.rank, group.size, dtype)
        result = [start_sum_of(group, lanes.groups, rows).wait()]
        everyone = rows_of(group.rank, group.size, dtype)
        for work in group.broadcast_rows(list(enumerate(everyone))):
            work.wait()
        result += everyone
        result.append(group.all_gather_rows(torch.full((5,), group.rank, dtype=torch.uint8)))
        results.append(result)
    assert_same_bits(results[1], results[0])


@on_ranks(2)
def test_an_optimizer_tells_that_it_sends_through_memory() -> None:
    for in_memory in (None, False, True, False):  # without a call it does
        if in_memory is not None:
            zero_optim.share_host_memory(in_memory)
        explanation = sharded(linear(), timeout=None).explain()
        through = "sockets (share_host_memory(False))" if in_memory is False else "memory"
        assert explanation.transport == through
        assert f"collectives a step, through {through}" in str(explanation)


@on_ranks(3)
def test_of_rows_with_other_tags_the_heads_are_taken_and_the_next_call_goes_on() -> None:
    group, _ = shared()
    rank = group.rank
    heads = torch.full((group.size, 3), float(rank))
    rows = [torch.full((1 + rank,), float(number)) for number in range(2 * group.size)]
    before = [row.clone() for row in rows]
    listed = [(number % group.size, row) for number, row in enumerate(rows)]  # two of each
    for work in group.broadcast_rows(listed, "", (heads, heads[rank]), 1 + rank):
        work.wait()
    assert torch.equal(heads, torch.arange(3.0).unsqueeze(1).expand(3, 3))
    assert_same_bits(rows, before)
    total = torch.ones(1000)
    group.start_sum(total).wait()
    assert torch.equal(total, torch.full((1000,), 3.0))


@on_ranks(2)
def test_a_rank_that_does_something_else_holds_nobody_up() -> None:
    """Its memory's own thread takes and sends what is more than a ring holds."""
    group, _ = shared()
    tensor = torch.full((2**22,), float(group.rank + 1))
    work = group.start_sum(tensor)
    if group.rank == 0:
        work.wait()
        dist.barrier()
    else:
        dist.barrier()  # it does not wait for the sum before
        work.wait()
    assert torch.equal(tensor, torch.full((2**22,), 3.0))


# ---------------------------------------------------------------------- when they do not


@on_ranks(2)
@pytest.mark.parametrize("refused", ["posix_fallocate", "pidfd_open"])
def test_ranks_go_on_over_sockets_where_one_cannot_share(refused: str) -> None:
    """They say so where somebody asks, and warn if they were told to share."""
    refusal = mock.patch.object(os, refused, side_effect=PermissionError("not here"))
    why = "not every rank can map the memory" if refused == "pidfd_open" else r"shared memory: not here"
    with refusal if dist.get_rank() == 1 else nullcontext():
        with mock.patch.object(hosts.logger, "debug") as debug:
            for _ in range(2):
                model = with_gradients(linear())
                optimizer = sharded(model, timeout=None)
        assert debug.call_count == 1, "once for a group"
        with pytest.warns(UserWarning, match=why):
            assert not zero_optim.share_host_memory()
    assert re.search(f"a step, through sockets \\(.*{why}", str(optimizer.explain()))
    optimizer.step()
    total = torch.ones(3)
    optimizer.ranks.start_sum(total).wait()
    assert torch.equal(total, torch.full((3,), 2.0))


@on_ranks(2)
def test_ranks_that_want_different_things_are_told() -> None:
    with pytest.raises(zero_optim.RankMismatchError, match="rank 0 has shares=False; rank 1 has shares=True"):
        zero_optim.share_host_memory(dist.get_rank() == 1)
    with pytest.raises(TypeError, match="expected shares to be True or False"):
        zero_optim.share_host_memory("yes")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- faults


def fail_to_add() -> str:
    group, _ = shared()
    broken = mock.patch.object(messages, "add_as_gloo", side_effect=ValueError("planted"))
    with broken if group.rank == 0 else nullcontext():
        try:
            group.start_sum(torch.ones(1000)).wait()
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "summed"


def test_an_error_in_a_sum_is_heard_by_all() -> None:
    said = [str(outcome.said) for outcome in outcomes(2, fail_to_add)]
    assert "planted" in said[0], said
    assert "rank 0" in said[1], said


@on_ranks(2)
def test_a_profile_has_a_range_for_what_comes() -> None:
    """Whichever thread moves it."""
    group, names = shared()[0], list[str]()

    def seen(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return nullcontext()

    profiling = mock.patch.object(channel, "is_profiling", return_value=True)
    with profiling, mock.patch("torch.profiler.record_function", seen):
        for work in group.broadcast_rows([(0, torch.ones(4))]):
            work.wait()
        group.start_sum(torch.ones(4), "").wait()
    assert set(names) == ({"memory:rows", "memory:sum"} if group.rank else {"memory:sum"})


def die_inside_a_row() -> None:
    """Be killed when a piece of a row is written and more of it is to come."""
    move = Outgoing.move

    def last_move(message: Outgoing) -> int:
        count = move(message)
        if count == PIECE:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    Outgoing.move = last_move  # type: ignore[method-assign]


def sum_without_one() -> str:
    optimizer = sharded(with_gradients(linear(2**10)))
    optimizer.step()
    if dist.get_rank() == 2:
        about_to_stall()
        die_inside_a_row()
    optimizer.step()
    return "stepped"


def test_every_other_rank_names_one_that_was_killed_as_it_wrote() -> None:
    for outcome in outcomes(3, sum_without_one)[:2]:
        assert str(outcome.said).startswith("StalledError: stalled"), outcome
        assert "rank 2 has ended" in outcome.said, outcome


def fill_a_ring(how: str) -> str:
    """Rank 0 sends more than a ring holds to rank 1, which does not read it until the ring is full."""
    group, memory = shared()
    sender = memory.sending[1 - group.rank]
    count = 3 * sender.size // 4 + 5  # elements of 4 bytes
    row = torch.arange(count, dtype=torch.float32) if group.rank == 0 else torch.zeros(count)
    pids = group.all_gather_json(os.getpid())
    store = private.get_default_store()
    if group.rank == 1:
        if how == "slow":
            store.wait(["full"])
        (work,) = group.broadcast_rows([(0, row)])
        store.set("begun", "")
        work.wait()
        return f"{torch.equal(row, torch.arange(count, dtype=torch.float32))}"
    if how != "slow":
        store.wait(["begun"])
        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: stat(pids[1])[0] == "T")
    (work,) = group.broadcast_rows([(0, row)])

    def is_full() -> bool:
        return bool(sender.at - sender.words[sender.read] == sender.size)

    wait_until(is_full)
    assert is_full()
    if how == "slow":
        store.set("full", "")
    else:
        os.kill(pids[1], signal.SIGKILL)
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return "sent"


@pytest.mark.parametrize("how", ["slow", "killed"])
def test_a_full_ring_waits_for_its_reader_as_long_as_that_lives(how: str) -> None:
    said = [outcome.said for outcome in outcomes(2, fill_a_ring, how)]
    if how == "killed":
        assert said == ["Connection closed by peer: rank 1 of the group has ended", None]
    else:
        assert said == ["sent", "True"]


def fork_and_sum() -> str:
    group, memory = shared()
    child = os.fork()
    if child == 0:
        try:
            group.start_sum(torch.ones(3))
        except RuntimeError as error:
            os._exit(0 if "a process that was forked from a rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    total = torch.ones(3)
    group.start_sum(total).wait()
    assert memory.failure is None
    return str(total.tolist())


def test_a_forked_child_cannot_take_part_and_its_end_ends_nothing() -> None:
    assert [outcome.said for outcome in outcomes(2, fork_and_sum)] == ["[2.0, 2.0, 2.0]"] * 2


def taken() -> list[str]:
    """What groups have taken: maps of memory, and threads."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    threads = [thread.name for thread in threading.enumerate()]
    return [each for each in maps + threads if "memfd:zero_optim" in each or each == "zero_optim host memory"]


def num_open() -> int:
    """Return the number of descriptors, once all that groups have taken has come back."""

    def is_back() -> bool:
        gc.collect()
        return not taken()

    wait_until(is_back)
    assert not taken()
    return len(list(Path("/proc/self/fd").iterdir()))


def use(group: dist.ProcessGroup | None, number: int) -> None:
    """Sum in memory; of every second group rank 0 then starts a call in which no other takes part."""
    ranks = RankGroup.of(group)
    find_hosts(ranks)
    total = torch.ones(2**20)
    ranks.start_sum(total).wait()
    assert taken()
    if number % 2 and ranks.rank == 0:
        ranks.start_sum(total)


@on_ranks(2, 3)
def test_what_a_group_takes_comes_back(tmp_path: Path) -> None:
    """Of sub-groups, then of default groups, whatever ran before in this process."""
    everyone, rank = range(dist.get_world_size()), dist.get_rank()
    RankGroup.of(None)  # now a default group lets go that was destroyed, and that somebody keeps

    def use_sub_groups() -> None:
        for number in range(5):
            group = dist.new_group()
            use(group, number)
            dist.barrier()
            dist.destroy_process_group(group)

    use_sub_groups()  # the first ones leave something of gloo's
    before = num_open()
    use_sub_groups()
    assert num_open() <= before
    leave()
    for number in range(5):
        with world(tmp_path, str(number), rank, everyone):
            use(None, number)
        assert num_open() <= before


@on_ranks(2)
def test_nothing_is_left_that_others_could_open() -> None:
    """The memory has no name, and its descriptors are closed once all have mapped it."""
    shared()
    open_now = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [name for name in open_now if "zero_optim" in name]
    assert not list(Path("/dev/shm").glob("*zero_optim*"))
