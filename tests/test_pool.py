"""The worker pool itself: the other tests are only worth what it reports."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pool import Pool, RankError, Ranks, RankTimeoutError
from processes import is_alive

HANG = 3600.0  # seconds: for ever, to these tests


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process_id() -> int:
    return os.getpid()


def fail_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("one bad rank")


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
