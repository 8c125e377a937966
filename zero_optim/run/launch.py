"""Run a function on several ranks of this host, from a script, a notebook or a test.

Note [Processes]
    `torch.multiprocessing.start_processes` starts them. The elastic launcher is not used. It offers
    rendezvous and restarts, which one call on one host does not need. It also takes over the signal handlers
    of the calling process, which a notebook needs itself. Processes are spawned, not forked. A fork inherits
    locks and thread pools without the threads, so it hangs at its first parallel loop, and it cannot use
    CUDA.

Note [Which failure is reported]
    When a rank fails, the others lose their connections and fail as well, and may end first. So each rank
    writes down the time of its exception before it closes anything. The earliest one is the cause. A killed
    rank writes nothing, and comes before those. An exception that only repeats that of another rank comes
    last, and is waited for least: `zero_optim.run.host.let_the_cause_end_first`.

Note [No process left]
    Before `launch` returns or raises, it kills the ranks without asking them. If the caller itself is killed,
    the kernel kills the ranks. Ctrl-C reaches only the caller: it is blocked while processes start, and each
    rank has its own session.

Note [Ctrl-C while ranks start]
    A `KeyboardInterrupt` inside of `start_processes` would lose the processes that were started, and the one
    that starts would lack its work. To block the signal is not enough: a mask is of one thread, and the
    kernel then gives the signal to another thread of the process, such as one of a BLAS library. Python
    raises in the main thread all the same. So there the handler is another one meanwhile, which only takes
    note. The mask is for the ranks, which inherit it until they have a handler of their own.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from zero_optim.errors import LaunchTimeoutError, RankFailedError
from zero_optim.run.host import (
    end_with_parent,
    let_the_cause_end_first,
    num_cores,
    order_of,
    use_loopback,
)
from zero_optim.run.session import decode_call, encode_call, pickler
from zero_optim.run.stacks import answer_with_stacks, stacks_of, traceback_text

T = TypeVar("T")

_GRACE = 0.5  # seconds in which the other ranks may fail too, once one has failed


def launch(
    fn: Callable[..., T],
    nproc: int,
    *args: object,
    backend: str = "gloo",
    threads: int | None = None,
    timeout: float | None = None,
    prepare: Callable[[int], object] | None = None,
) -> list[T]:
    """Run ``fn(*args)`` on ``nproc`` ranks of this host, and return what each rank returned.

    Each rank is a new process with an initialised default process group on the loopback interface. See Notes
    [Processes], [Which failure is reported] and [No process left].

    Functions from a notebook cell or a prompt, lambdas and nested functions are sent as code, with the
    current values of the global names that they use. That needs cloudpickle to be installed. A script needs
    ``if __name__ == "__main__":`` around the code that calls this, since the ranks import the script.

    Args:
        fn: called on each rank. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are set as
            torchrun sets them.
        nproc: number of ranks, at least 1.
        *args: the same for every rank; pickled, so each rank has its own copy, also of tensors.
        backend: of the process group; with "nccl" rank r uses GPU r.
        threads: PyTorch's threads on each rank; None divides the cores between the ranks.
        timeout: seconds for the whole call, including some seconds to start; None has no limit.
        prepare: called on each rank with its rank, before the process group is made: to set environment
            variables that a backend reads, or to enter a network namespace. Sent as ``fn`` is.

    Returns:
        What ``fn`` returned, by rank; anything that can be pickled.

    Raises:
        TypeError: an argument of the wrong kind, or one that cannot be sent to another process.
        ValueError: an argument out of range, or a backend that this PyTorch or this host lacks.
        RankFailedError: ``fn`` raised, or a rank was killed or ended by itself.
        LaunchTimeoutError: the ranks took longer than ``timeout``.
        RuntimeError: the call is not under ``if __name__ == "__main__":``.
    """
    _check(fn, nproc, backend, threads, timeout, prepare)
    calls = {"call": encode_call(fn, args)}
    if prepare is not None:
        calls["prepare"] = encode_call(prepare, ())
    deadline = None if timeout is None else monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="zero_optim-") as folder:
        job = _Job(folder, nproc, backend, threads or max(1, num_cores() // nproc), os.getpid())
        for name, call in calls.items():
            job.path(name).write_bytes(call)
        with _started(job) as processes:
            _wait(processes, deadline)
            failures = job.failures(processes)
            if failures:
                raise RankFailedError(_failures_text(failures, nproc), failures[0].rank)
            late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            if late:
                raise LaunchTimeoutError(_stacks_text(job, processes, late, timeout))
        return job.values()


def _check(
    fn: object, nproc: object, backend: object, threads: object, timeout: object, prepare: object
) -> None:
    """Refuse wrong arguments before any process starts."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch() was called while a rank imported the main module: put the code that calls it under "
            '`if __name__ == "__main__":`'
        )
    if not callable(fn):
        raise TypeError(f"expected fn to be callable, got {type(fn).__name__}")
    if prepare is not None and not callable(prepare):
        raise TypeError(f"expected prepare to be callable, or None, got {type(prepare).__name__}")
    for name, value in (("nproc", nproc), ("threads", threads)):
        if value is None and name == "threads":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"expected {name} to be at least 1, got {value}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"expected timeout to be a number of seconds above 0, or None, got {timeout!r}")
    if not isinstance(backend, str) or not dist.is_backend_available(backend):
        raise ValueError(f'this PyTorch has no backend {backend!r}: try "gloo"')
    if backend == "nccl" and torch.cuda.device_count() < int(str(nproc)):
        raise ValueError(
            f"nccl needs a GPU for each of {nproc} ranks, this host has {torch.cuda.device_count()}"
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank failed.

    Attributes:
        rank: the rank.
        order: smaller for causes than for consequences.
        text: the traceback, or what is known without one.
        line: the kind of exception, or the same as ``text``.
    """

    rank: int
    order: list[int]
    text: str
    line: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What both the caller and the ranks know.

    Attributes:
        folder: where they leave files for each other.
        nproc: number of ranks.
        backend: of their process group.
        threads: PyTorch's threads on each rank.
        parent: process id of the caller.
    """

    folder: str
    nproc: int
    backend: str
    threads: int
    parent: int

    def path(self, name: str, rank: int | None = None) -> Path:
        """Name a file, of one rank or of all."""
        return Path(self.folder, name if rank is None else f"{name}-{rank}")

    def failures(self, processes: Sequence[BaseProcess]) -> list[_Failure]:
        """List the ranks that have failed so far, the cause first."""
        found = (self._failure(rank, process.exitcode) for rank, process in enumerate(processes))
        return sorted(filter(None, found), key=lambda failure: failure.order)

    def _failure(self, rank: int, exitcode: int | None) -> _Failure | None:
        if self.path("failure", rank).exists():
            return _Failure(**json.loads(self.path("failure", rank).read_text()))
        if exitcode is None or (exitcode == 0 and self.path("value", rank).exists()):
            return None
        line = f"was killed by {_signal(-exitcode)}" if exitcode < 0 else f"ended with status {exitcode}"
        why = ""
        if not self.path("begun", rank).exists():
            why = (
                " before it could begin: what it printed says why. A script that calls launch() needs "
                '`if __name__ == "__main__":` around that code, since the ranks import the script'
            )
        return _Failure(rank, [0, rank], line + why, line)

    def is_told(self) -> bool:
        """Tell whether every rank has left its value, or why it failed."""
        return all(
            any(self.path(name, rank).exists() for name in ("failure", "value")) for rank in range(self.nproc)
        )

    def values(self) -> list[Any]:
        """Read what the ranks returned."""
        return [torch.load(self.path("value", rank), weights_only=False) for rank in range(self.nproc)]


# ---------------------------------------------------------------------- the caller


@contextmanager
def _started(job: _Job) -> Iterator[list[BaseProcess]]:
    """Start the ranks, and end all of them, however the body ends."""
    processes: list[BaseProcess] = []
    try:
        # Starting a process starts the resource tracker first, which would unblock SIGINT for the ranks.
        resource_tracker.ensure_running()
        with _interrupt_held_back():
            context: Any = start_processes(_enter, (job,), job.nproc, join=False)  # type: ignore[no-untyped-call]
            processes += context.processes
        yield processes
    finally:
        _end(processes)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Have a Ctrl-C act after the body, not in it; see Note [Ctrl-C while ranks start]."""
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and only there does one raise. What is no function does not.
    is_replaced = threading.current_thread() is threading.main_thread() and callable(handler)
    if is_replaced:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if is_replaced:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _wait(processes: Sequence[BaseProcess], deadline: float | None) -> None:
    """Wait until all have ended, or until the deadline. Once one has failed, wait only `_GRACE` longer."""
    failed = False
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        if not failed and any(process.exitcode for process in processes):
            failed = True
            grace = monotonic() + _GRACE
            deadline = grace if deadline is None else min(deadline, grace)
        left = None if deadline is None else deadline - monotonic()
        if left is not None and left <= 0:
            return
        wait(running, left)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill the ranks that still run, with the processes that they started, and wait for their end."""
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):  # not in a session of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _failures_text(failures: Sequence[_Failure], nproc: int) -> str:
    """Describe the first failure in full, and the others in one line."""
    first, *others = failures
    text = f" failed:\n\n{first.text}" if "\n" in first.text else f" {first.text}"
    lines = [f"rank {first.rank} of {nproc}{text}"]
    if others:
        lines.append(
            "\n\nafterwards failed: " + ", ".join(f"rank {each.rank} ({each.line})" for each in others)
        )
    return "".join(lines)


def _stacks_text(
    job: _Job, processes: Sequence[BaseProcess], late: Sequence[int], timeout: float | None
) -> str:
    """Tell where the late ranks are."""
    begun = {rank: pid for rank in late if (pid := processes[rank].pid) and job.path("begun", rank).exists()}
    stacks = stacks_of({rank: (pid, job.path("stacks", rank)) for rank, pid in begun.items()})
    lines = [f"no end after {timeout:g} s on rank {', '.join(map(str, late))} of {job.nproc}"]
    told = (f"\nrank {rank}, {stacks.get(rank, 'still starting')}" for rank in late)
    return "\n".join([*lines, *told])


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------------- the ranks


def _enter(rank: int, job: _Job) -> None:
    """Run as a rank: call the function in a process group, and write a file that says how it ended."""
    end_with_parent(job.parent)
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which processes started here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    answer_with_stacks(job.path("stacks", rank))
    job.path("begun", rank).touch()
    try:
        _run(rank, job)
    except BaseException as error:  # noqa: BLE001 - the caller raises for all of them
        _write_failure(error, rank, job)
        sys.stdout.flush()
        sys.stderr.flush()
        let_the_cause_end_first(error, job.is_told)
        os._exit(1)  # without destroying the process group, which may take for ever


def _run(rank: int, job: _Job) -> None:
    torch.set_num_threads(job.threads)
    use_loopback()
    size = str(job.nproc)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    if job.path("prepare").exists():
        prepare, _ = decode_call(job.path("prepare").read_bytes())
        prepare(rank)
    device: dict[str, Any] = {}
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
        device = {"device_id": torch.device("cuda", rank)}
    store = dist.FileStore(str(job.path("store")), job.nproc)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.nproc, **device)
    _wait_for_connections(store, job.nproc)
    fn, args = decode_call(job.path("call").read_bytes())
    value = fn(*args)
    # Like pickle, but tensors that share memory are written once, and classes of a notebook can be returned.
    torch.save(value, job.path("value", rank), pickle_module=pickler())
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_connections(store: dist.Store, nproc: int) -> None:  # type: ignore[name-defined]
    """Wait until every rank has connected: a rank that ends early breaks the connections of the others."""
    if store.add("connected", 1) == nproc:
        store.set("all connected", "")
    store.wait(["all connected"])


def _write_failure(error: BaseException, rank: int, job: _Job) -> None:
    """Write a file about an exception, in one step, without the frames of this file."""
    now = monotonic_ns()  # one clock for all processes of a host
    text = traceback_text(error, __file__)
    order = [order_of(error), now]
    path = job.path("failure", rank)
    failure = _Failure(rank, order, text, type(error).__name__)
    path.with_suffix(".part").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".part").rename(path)
