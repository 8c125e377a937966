"""The worker pool itself: the other tests are only worth what it reports."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import Pool, RankError, Ranks, RankTimeoutError
from processes import is_alive
from waiting import wait_until

HANG = 3600.0  # seconds: for ever, to these tests


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process_id() -> int:
    return os.getpid()


def fail_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("one bad rank")


def fail_while_peers_wait(bad: int, folder: Path) -> None:
    if dist.get_rank() == bad:
        wait_until(lambda: len(list(folder.iterdir())) == dist.get_world_size() - 1)
    else:
        (folder / str(dist.get_rank())).touch()
    fail_on(bad)
    dist.barrier()


def wait_in_a_collective(mark: Path) -> None:
    mark.touch()
    dist.barrier()


def sleep_and_never_arrive(mark: Path) -> None:
    mark.touch()
    time.sleep(HANG)


def last_rank_never_arrives(folder: Path) -> None:
    mark = folder / f"rank {dist.get_rank()} is there"
    if dist.get_rank() == dist.get_world_size() - 1:
        sleep_and_never_arrive(mark)
    wait_in_a_collective(mark)


def fork_and_die(mark: Path) -> None:
    """The child, which has the pipe to the pool too, lives until the mark is there."""
    if os.fork() == 0:
        wait_until(mark.exists)
        os._exit(0)
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_by_exit() -> None:
    sys.exit("gave up")


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=2)


def fail_in_a_thread() -> None:
    thread = threading.Thread(target=fail_on, args=(dist.get_rank(),))
    thread.start()
    thread.join()


def return_a_lock() -> object:
    return threading.Lock()


def go_wrong_in_a_way_of_its_own() -> object:
    ways = (leave_by_exit, warn, fail_in_a_thread, return_a_lock)
    return ways[dist.get_rank()]()


def draw_then_spoil_the_state() -> tuple[float, float, torch.dtype]:
    drawn = random.random(), torch.rand(()).item(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return drawn


def leave_a_subgroup() -> None:
    dist.new_group([0])


KEPT = object()  # of a worker


class Cycle:
    """Garbage that only a collection frees, and that leaves more of it for the next one, some times."""

    def __init__(self, holds: object, times: int) -> None:
        self.holds, self.times, self.itself = holds, times, self

    def __del__(self) -> None:
        if self.times:
            Cycle(self.holds, self.times - 1)


def leave_garbage_in_garbage() -> None:
    Cycle(KEPT, times=5)


def count_holders() -> int:
    gc.collect()
    return sys.getrefcount(KEPT)


def print_process_ids_and_hang(folder: str) -> None:
    """Run in a process of its own, which is then killed: a test session that ends badly."""
    with Pool() as pool:
        print(*pool.run(2, process_id), flush=True)  # noqa: T201 - the test reads it
        pool.run(2, last_rank_never_arrives, Path(folder), timeout=HANG)


def test_values_come_back_in_rank_order_from_processes_that_are_kept(pool: Pool) -> None:
    for size in (2, 4):
        assert pool.run(size, rank_and_size) == [(rank, size) for rank in range(size)]
    four = pool.run(4, process_id)
    assert pool.run(4, process_id) == four
    assert pool.run(2, process_id) == four[:2]


def test_an_exception_names_its_rank_and_shows_its_traceback(failing2: Ranks) -> None:
    with pytest.raises(RankError, match="fail_on failed on rank 1 of 2") as caught:
        failing2.run(fail_on, 1)
    assert list(caught.value.reports) == [1]
    assert caught.value.reports[1].startswith("Traceback (most recent call last)")
    assert "in fail_on" in caught.value.reports[1]
    assert caught.value.reports[1].endswith("ValueError: one bad rank\n")


def test_peers_that_wait_for_a_failed_rank_do_not_wait_out_the_timeout(
    failing2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.PEER_GRACE", 0.1)  # the peer is where it has to be
    with pytest.raises(RankError, match="failed on rank 1 of 2") as caught:
        failing2.run(fail_while_peers_wait, 1, tmp_path, timeout=HANG)  # waited out, pytest would end the run
    assert caught.value.reports[0].startswith("has not replied, most recent call first:\n")
    assert "in fail_while_peers_wait" in caught.value.reports[0]


def test_a_hang_shows_the_stack_of_every_rank_and_the_next_call_works(
    failing2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = failing2.run(process_id)

    def wait_until_all_are_there(*_: object) -> list[object]:
        while len(list(tmp_path.iterdir())) < failing2.size:
            time.sleep(0.01)
        return []  # as `wait` does when time is over: however slow the ranks were, it is then

    monkeypatch.setattr("pool.wait", wait_until_all_are_there)
    with pytest.raises(RankTimeoutError, match="did not end within 1 s") as caught:
        failing2.run(last_rank_never_arrives, tmp_path, timeout=1.0)
    monkeypatch.undo()
    early, late = caught.value.reports[0], caught.value.reports[1]
    assert "in wait_in_a_collective" in early
    assert "in sleep_and_never_arrive" in late
    assert all(stack.rstrip() in str(caught.value) for stack in (early, late))
    after = failing2.run(process_id)
    assert not set(before) & set(after)
    assert not any(map(is_alive, before))


def test_a_process_that_dies_is_reported(failing2: Ranks) -> None:
    with pytest.raises(RankError, match=f"died with exit code -{signal.SIGKILL.value}"):
        failing2.run(die)


def test_a_process_that_dies_is_reported_while_its_child_lives(failing2: Ranks, tmp_path: Path) -> None:
    mark = tmp_path / "reported"
    with pytest.raises(RankError, match=f"died with exit code -{signal.SIGKILL.value}"):
        failing2.run(fork_and_die, mark)
    mark.touch()


def test_nothing_that_goes_wrong_on_a_rank_passes_silently(
    failing4: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.PEER_GRACE", 60.0)  # all of them fail, and none is waited for in vain
    with pytest.raises(RankError, match="failed on rank 0, 1, 2, 3 of 4") as caught:
        failing4.run(go_wrong_in_a_way_of_its_own)
    ends = [caught.value.reports[rank].rstrip() for rank in range(4)]
    assert ends[0].endswith("SystemExit: gave up")
    assert ends[1].endswith("UserWarning: careful")
    assert ends[2].endswith("ValueError: one bad rank")
    assert ends[3].endswith("cannot pickle '_thread.lock' object")


@pytest.mark.filterwarnings("ignore:careful")
def test_warning_filters_of_a_test_hold_on_the_ranks(ranks1: Ranks) -> None:
    assert ranks1.run(warn) == [None]


def test_state_groups_and_garbage_that_a_call_left_do_not_disturb_the_next(ranks2: Ranks) -> None:
    first = ranks2.run(draw_then_spoil_the_state)
    assert first[0] == first[1]
    assert first[0][2] == torch.float32
    assert ranks2.run(draw_then_spoil_the_state) == first
    ranks2.run(leave_a_subgroup)
    assert ranks2.run(rank_and_size) == [(0, 2), (1, 2)]
    before = ranks2.run(count_holders)
    ranks2.run(leave_garbage_in_garbage)
    assert ranks2.run(count_holders) == before


def finish_at_once() -> None:
    """Talks to nobody."""


def test_a_rank_that_is_done_waits_with_its_end_until_the_others_are_connected(failing4: Ranks) -> None:
    for _ in range(8):
        failing4.run(finish_at_once)


@pytest.mark.slow
def test_no_worker_outlives_a_killed_session(tmp_path: Path) -> None:
    script = f"import test_pool; test_pool.print_process_ids_and_hang({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        workers = [int(pid) for pid in session.stdout.readline().split()]
        alive = [is_alive(pid) for pid in workers]
        session.kill()
    assert alive == [True, True]
    wait_until(lambda: not any(map(is_alive, workers)))
    assert not any(map(is_alive, workers))
