"""Runs a function on several ranks of this host, from a script, a notebook or a test.

Note [Processes]
    PyTorch's elastic launcher takes over the caller's signal handlers, which a notebook needs. Processes are
    spawned: a fork inherits locks and thread pools without the threads, and cannot use CUDA.

Note [No process left]
    `launch` kills the ranks before it returns or raises; the kernel kills them if the caller is killed.
    Ctrl-C reaches only the caller: each rank has its own session, and starting blocks it.

Note [Ctrl-C while ranks start]
    A `KeyboardInterrupt` inside `start_processes` would lose processes, and if the signal is blocked, another
    thread gets it. So the handler only records it meanwhile. The ranks inherit the mask until they have a
    handler.
"""

import importlib.util
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from zero_optim.errors import LaunchTimeoutError, RankFailedError
from zero_optim.run.host import num_cores
from zero_optim.run.rank import Failure, Job, enter
from zero_optim.run.stacks import stacks_of

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

    Each rank is a new process with an initialised default process group on the loopback interface.

    Notebook functions, lambdas and nested functions are sent as code, with the current values of their
    globals; that needs cloudpickle. A script needs ``if __name__ == "__main__":`` around the call.

    Args:
        fn: called on each rank, with ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` set as
            by torchrun.
        nproc: number of ranks, at least 1.
        *args: equal for every rank; pickled, as what ``fn`` returns.
        backend: of the process group; with "nccl" rank r uses GPU r.
        threads: PyTorch's threads on each rank; None divides the cores.
        timeout: seconds for the whole call, including some to start; None for no limit.
        prepare: called on each rank with its rank before the process group is made.

    Raises:
        TypeError: an argument has a wrong type, or cannot be sent to another process.
        ValueError: an argument is out of range, or this PyTorch or host lacks the backend.
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
        job = Job(folder, nproc, backend, threads or max(1, num_cores() // nproc), os.getpid())
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


@contextmanager
def _started(job: Job) -> Iterator[list[BaseProcess]]:
    """Start the ranks for the body, and end them all however it ends."""
    processes: list[BaseProcess] = []
    try:
        # Starting a process starts the resource tracker first, which would unblock SIGINT for the ranks.
        resource_tracker.ensure_running()
        with _interrupt_held_back():
            context: Any = start_processes(enter, (job,), job.nproc, join=False)  # type: ignore[no-untyped-call]
            processes += context.processes
        yield processes
    finally:
        _end(processes)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Delay a Ctrl-C until after the body; see Note [Ctrl-C while ranks start]."""
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and only there does one raise. What is no function does not.
    is_replaced = threading.current_thread() is threading.main_thread() and callable(handler)
    if is_replaced:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_replaced:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _wait(processes: Sequence[BaseProcess], deadline: float | None) -> None:
    """Wait for all ranks or the deadline; after a failure only `_GRACE` longer."""
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
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):  # not in a session of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _failures_text(failures: Sequence[Failure], nproc: int) -> str:
    first, *others = failures
    text = f" failed:\n\n{first.text}" if "\n" in first.text else f" {first.text}"
    lines = [f"rank {first.rank} of {nproc}{text}"]
    if others:
        lines.append(
            "\n\nafterwards failed: " + ", ".join(f"rank {each.rank} ({each.line})" for each in others)
        )
    return "".join(lines)


def _stacks_text(
    job: Job, processes: Sequence[BaseProcess], late: Sequence[int], timeout: float | None
) -> str:
    begun = {rank: pid for rank in late if (pid := processes[rank].pid) and job.path("begun", rank).exists()}
    stacks = stacks_of({rank: (pid, job.path("stacks", rank)) for rank, pid in begun.items()})
    lines = [f"no end after {timeout:g} s on rank {', '.join(map(str, late))} of {job.nproc}"]
    texts = (f"\nrank {rank}, {stacks.get(rank, 'still starting')}" for rank in late)
    return "\n".join([*lines, *texts])


def encode_call(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Encode a call once for all ranks; TypeError if the function, or what it uses, cannot be sent.

    cloudpickle, an optional package, sends functions as code, here with the lines of a notebook, for
    tracebacks.
    """
    name, main = getattr(function, "__qualname__", repr(function)), sys.modules["__main__"]
    is_typed = getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")  # at a prompt
    needs_code = getattr(function, "__module__", None) == "__main__" and is_typed
    try:
        if not (needs_code or "<locals>" in name or "<lambda>" in name):
            return pickle.dumps((function, args, {}))
        if importlib.util.find_spec("cloudpickle") is None:
            raise TypeError("no import finds it, and cloudpickle is not installed (pip install cloudpickle)")
        import cloudpickle

        cells = {key: entry for key, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
        encoded: bytes = cloudpickle.dumps((function, args, cells))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} cannot be sent to new processes with its arguments and what it uses: {error}. Make such "
            "things on the ranks, inside the function, or define them in a module"
        ) from error
    return encoded
