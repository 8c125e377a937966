"""`zero_optim.launch`: values and failures come back, no process stays, notebooks and scripts work."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from processes import is_alive, listening, reachable_from_outside
from waiting import LIMIT, wait_until
from zero_optim import LaunchTimeoutError, RankFailedError, launch
from zero_optim.run.rank import decode_call, encode_call

CHECKOUT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "notebooks")))}


@pytest.fixture
def peers_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of a rank that failed get all the time they need to fail too."""
    monkeypatch.setattr("zero_optim.run.launch._GRACE", LIMIT)


def name_rank(rank: int) -> None:
    assert not dist.is_initialized()
    os.environ["NAME_OF_THE_TEST"] = f"rank {rank}"


def sum_over_ranks(start: torch.Tensor) -> dict[str, Any]:
    start += dist.get_rank()  # its own copy
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    total = start.clone()
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "total": total,
        "rank": dist.get_rank(),
        "environment": [int(os.environ[name]) for name in names],
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "name": os.environ["NAME_OF_THE_TEST"],
        "listens": listening("self"),
        "listens outside": reachable_from_outside("self"),
    }


def leave_word(folder: Path) -> None:
    folder.joinpath(f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    dist.barrier()


def fail_on_one(folder: Path) -> None:
    leave_word(folder)
    if dist.get_rank() == 1:
        raise ValueError("the cause of it all")
    dist.all_reduce(torch.ones(3))


def hang(folder: Path) -> None:
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(["sleep", "600"], stdout=quiet, stderr=quiet)
    folder.joinpath(f"{dist.get_rank()}-started.pid").write_text(str(started.pid))
    leave_word(folder)
    time.sleep(600)


def pids_in(folder: Path, count: int) -> list[int]:
    files = sorted(folder.glob("*.pid"))
    assert len(files) == count
    return [int(file.read_text()) for file in files]


def have_left_word(folder: Path, count: int) -> bool:
    """Whether as many processes have written who they are."""
    return sum(file.stat().st_size > 0 for file in folder.glob("*.pid")) == count


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)))
    assert [pid for pid in pids if is_alive(pid)] == []


def test_every_rank_is_prepared_runs_in_a_group_on_loopback_alone_and_returns_its_value() -> None:
    start = torch.zeros(3)
    for rank, value in enumerate(launch(sum_over_ranks, 2, start, prepare=name_rank)):
        assert torch.equal(value["total"], torch.ones(3))
        assert value["rank"] == rank
        assert value["environment"] == [rank, rank, 2, 2]
        assert value["backend"] == "gloo"
        assert value["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
        assert value["name"] == f"rank {rank}"
        assert value["listens"]
        assert value["listens outside"] == []
        assert not is_alive(value["pid"])
    assert torch.equal(start, torch.zeros(3))  # ranks have copies


@pytest.mark.usefixtures("peers_have_time")
def test_the_rank_that_failed_first_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(fail_on_one, 2, tmp_path)
    message = str(caught.value)
    assert caught.value.rank == 1
    assert message.startswith("rank 1 of 2 failed:\n\nTraceback")
    assert 'raise ValueError("the cause of it all")' in message
    assert message.index("ValueError: the cause of it all") < message.index("afterwards failed: rank ")
    assert "zero_optim/run/" not in message  # frames of the launcher tell nothing
    assert_gone(pids_in(tmp_path, 2))


def test_a_timeout_tells_where_the_ranks_were_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time passes here once the rank hangs, however long that takes.
    # Only for the launcher: multiprocessing waits for ever with a clock that stands still.
    clock = "zero_optim.run.launch.monotonic"
    monkeypatch.setattr(clock, lambda: 100.0 if have_left_word(tmp_path, 2) else 0.0)
    with pytest.raises(LaunchTimeoutError, match="no end after 1 s on rank 0 of 1") as caught:
        launch(hang, 1, tmp_path, timeout=1)
    monkeypatch.undo()
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value).count(" in hang") == 1
    assert_gone(pids_in(tmp_path, 2))  # with what they had started


@pytest.mark.slow
def test_no_rank_outlives_its_caller(tmp_path: Path) -> None:
    code = f"""
        import pathlib, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_launch import hang
        from zero_optim import launch
        launch(hang, 2, pathlib.Path({str(tmp_path)!r}))
    """
    with python(code) as caller:
        wait_until(lambda: have_left_word(tmp_path, 4))
        ranks = [int(file.read_text()) for file in tmp_path.glob("?.pid")]
        caller.kill()
        assert len(ranks) == 2
        assert_gone(ranks)
    for file in tmp_path.glob("*-started.pid"):  # orphans of ranks that the kernel has killed
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """Runs code in a session of its own, and ends it."""
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    options: dict[str, Any] = {"text": True, "env": ENVIRONMENT, "start_new_session": True}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fn": "train"}, TypeError, "expected fn to be callable, got str"),
        ({"nproc": 0}, ValueError, "expected nproc to be at least 1, got 0"),
        ({"timeout": 0}, ValueError, "expected timeout to be a number of seconds above 0, or None, got 0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"fn": sum_over_ranks, "nproc": 2, **change}
    with pytest.raises(error, match=message):
        launch(arguments.pop("fn"), arguments.pop("nproc"), **arguments)


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_nccl_of_any_name_needs_a_gpu_for_each_rank(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    with pytest.raises(ValueError, match=f"{backend} needs a GPU for each of 1000 ranks, this host has"):
        launch(sum_over_ranks, 1000, backend=backend)


def test_what_cannot_be_sent_is_refused_with_the_reason() -> None:
    lock = threading.Lock()

    def with_lock() -> None:
        lock.acquire()

    message = r"with_lock cannot be sent to new processes .*: cannot pickle '_thread.lock' object\. Make such"
    with pytest.raises(TypeError, match=message):
        launch(with_lock, 2)


# ---------------------------------------------------------------------- by value


def test_what_can_be_imported_goes_by_reference_and_nested_functions_with_closures_and_recursion() -> None:
    function, _ = decode_call(encode_call(sum_over_ranks, ()))
    assert function is sum_over_ranks
    base = 3

    def factorial(n: int, *, scale: int = 2) -> int:
        return scale if n == 0 else n * factorial(n - 1, scale=scale) + 0 * base

    for nested, number, result in ((factorial, 4, 48), (lambda x: x + base, 1, 4)):
        function, args = decode_call(encode_call(nested, (number,)))
        assert function(*args) == result
