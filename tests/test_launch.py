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
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from make_outputs import run_cells

from processes import is_alive, listening, reachable_from_outside
from waiting import LIMIT, wait_until
from zero_optim import LaunchTimeoutError, RankFailedError, RemoteRankError, launch
from zero_optim.errors import StalledError, mark_remote
from zero_optim.run import host
from zero_optim.run import rank as rank_side
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


def vanish_on_one(folder: Path) -> None:
    leave_word(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def hang(folder: Path) -> None:
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(["sleep", "600"], stdout=quiet, stderr=quiet)
    folder.joinpath(f"{dist.get_rank()}-started.pid").write_text(str(started.pid))
    leave_word(folder)
    time.sleep(600)


def give_no_value() -> object:
    if dist.get_rank() == 1:
        os._exit(0)
    return threading.Lock()


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


@pytest.mark.slow
def test_a_rank_that_was_killed_is_told_before_those_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 was killed by SIGKILL") as caught:
        launch(vanish_on_one, 2, tmp_path)
    assert caught.value.rank == 1
    assert_gone(pids_in(tmp_path, 2))


@pytest.mark.usefixtures("peers_have_time")
def test_a_rank_without_a_value_and_one_whose_value_cannot_be_pickled_have_failed() -> None:
    message = r"^rank 1 of 2 ended with status 0\n\nafterwards failed: rank 0 \(TypeError\)$"
    with pytest.raises(RankFailedError, match=message):
        launch(give_no_value, 2)


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


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_no_rank_outlives_its_caller(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs behind
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_launch import hang
        from zero_optim import launch
        launch(hang, 2, pathlib.Path({str(tmp_path)!r}))
    """
    with python(code) as caller:
        wait_until(lambda: have_left_word(tmp_path, 4))
        ranks = [int(file.read_text()) for file in tmp_path.glob("?.pid")]
        os.kill(caller.pid, number)
        _, errors = caller.communicate(timeout=LIMIT)
        assert caller.returncode != 0
        assert errors.rstrip().endswith("KeyboardInterrupt") == (number == signal.SIGINT)
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


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    command, limit = [sys.executable, str(script)], LIMIT
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, env=ENVIRONMENT
    )


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import os\nfrom zero_optim import launch\nlaunch(os.getpid, 1)\n")
    assert done.returncode == 1
    assert "forgotten to use the proper idiom" in done.stderr
    assert "\nzero_optim.errors.RankFailedError: rank 0 of 1 ended with status 1" in done.stderr
    assert "needs `if __name__ ==" in done.stderr


FIRST_CELL = """
from dataclasses import dataclass

import torch
import torch.distributed as dist
import zero_optim.ddp
from torch import nn
from zero_optim import RankFailedError, launch

# Whatever the notebook has computed itself, with threads and with autograd, must not matter to the ranks.
nn.Linear(512, 512)(torch.randn(512, 512)).sum().backward()


@dataclass
class Outcome:
    rank: int
    threads: int
    loss: float


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def train(width):
    torch.manual_seed(0)
    loss = zero_optim.ddp.DistributedDataParallel(Net(width, width))(torch.ones(1024, width))
    loss.backward()
    return Outcome(dist.get_rank(), torch.get_num_threads(), loss.item())


found = launch(train, 2, 64, threads=2, timeout=240)
"""
SECOND_CELL = """
assert [outcome.rank for outcome in found] == [0, 1]
assert isinstance(found[0], Outcome)
assert found[1].threads == 2
assert found[0].loss == found[1].loss > 0


def fail():
    raise ValueError("in a cell")


try:
    launch(fail, 1)
except RankFailedError as error:
    print(error)
"""


@pytest.mark.slow
def test_functions_and_classes_of_a_notebook_cell_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (FIRST_CELL, SECOND_CELL)]
    )
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    run_cells(notebook, tmp_path, timeout=400)
    told = "".join(output["text"] for output in notebook.cells[1].outputs)
    assert told.startswith("rank 0 of 1 failed:\n\nTraceback")
    assert ', in fail\n    raise ValueError("in a cell")\nValueError: in a cell' in told


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fn": "train"}, TypeError, "expected fn to be callable, got str"),
        ({"nproc": 0}, ValueError, "expected nproc to be at least 1, got 0"),
        ({"nproc": 2.0}, TypeError, "expected nproc to be an int, got float"),
        ({"nproc": True}, TypeError, "expected nproc to be an int, got bool"),
        ({"threads": 0}, ValueError, "expected threads to be at least 1, got 0"),
        ({"timeout": 0}, ValueError, "expected timeout to be a number of seconds above 0, or None, got 0"),
        ({"backend": "pigeon"}, ValueError, "this PyTorch has no backend 'pigeon'"),
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


# ---------------------------------------------------------------------- the end of a rank


def raised(*errors: Exception) -> Exception:
    """Give the last of some exceptions, as if each had been raised while the one before was dealt with."""
    for before, error in pairwise(errors):
        error.__context__ = before
    return errors[-1]


def waited(*before: Exception) -> Exception:
    """What a wait raises, with what the backend raised as its cause."""
    stalled = StalledError("rank 1 does not come")
    stalled.__cause__ = stalled.__context__ = raised(*before, RuntimeError("Timed out waiting 1000ms"))
    return stalled


def test_a_rank_that_only_heard_of_a_failure_is_told_from_the_cause_and_waits_until_all_have_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, own = RemoteRankError, KeyError
    closed = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:5")
    assert rank_side.order_of(own("b")) == 1
    assert rank_side.order_of(raised(heard("rank 1 failed"), own("b"))) == 1
    assert rank_side.order_of(waited(own("b"))) == 2
    assert rank_side.order_of(raised(own("b"), heard("rank 1 failed"))) == 2
    for error in (mark_remote(ValueError("rank 1: no")), heard("rank 1 failed"), closed, waited()):
        assert rank_side.order_of(error) == 3

    looks: list[float] = []
    monkeypatch.setattr(rank_side, "sleep", looks.append)
    rank_side.let_the_cause_end_first(heard("rank 1 failed"), lambda: len(looks) == 3)
    assert len(looks) == 3
    rank_side.let_the_cause_end_first(own("b"), lambda: False)  # a cause waits for nobody
    assert len(looks) == 3


class Ended(Exception):
    """Raised where a process would have ended."""


def test_where_the_kernel_does_not_help_a_rank_looks_for_its_parent_and_ends_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    with monkeypatch.context() as patch:
        parents, waits = iter([5, 5, 1]), []
        patch.setattr(os, "getppid", lambda: next(parents))
        patch.setattr(time, "sleep", waits.append)
        with pytest.raises(Ended, match="1"):
            host.watch(5)
        assert len(waits) == 2
    watched = threading.Event()
    monkeypatch.setattr(host, "_ask_kernel", lambda: False)
    monkeypatch.setattr(host, "watch", lambda parent: watched.set())
    host.end_with_parent(os.getppid())
    assert watched.wait(LIMIT)
    with pytest.raises(Ended):  # the parent is gone already
        host.end_with_parent(os.getppid() + 1)


def test_ranks_of_one_host_use_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    host.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"  # named by the user, who may have a reason
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    host.use_loopback()
    assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
