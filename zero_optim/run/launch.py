"""Runs a function on several ranks of this host, from a script, a notebook or a test.

Note [Processes]
    PyTorch's elastic launcher takes over signal handlers, which a notebook needs. Ranks are spawned: a fork
    inherits locks without their threads, and cannot use CUDA. `launch` kills them before it returns; the
    kernel kills them if the caller is killed. Ctrl-C reaches only the caller: each rank has its own session.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import TypeVar

import torch
import torch.distributed as dist

from zero_optim.errors import LaunchTimeoutError, RankFailedError
from zero_optim.run.rank import Failure, Job, encode_call, enter
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

    Each rank is a new process with an initialised default process group on the loopback interface. Functions
    of a notebook, lambdas and nested functions are sent as code, which needs cloudpickle. A script needs
    ``if __name__ == "__main__":`` around the call.

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
        TypeError, ValueError: an argument is wrong or cannot be sent, or this host lacks the backend.
        RankFailedError: ``fn`` raised, or a rank was killed or ended by itself.
        LaunchTimeoutError: the ranks took longer than ``timeout``.
    """
    _check(fn, nproc, backend, threads, timeout, prepare)
    deadline = None if timeout is None else monotonic() + timeout
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="zero_optim-") as folder:
        share = max(1, len(os.sched_getaffinity(0)) // nproc)  # of the cores that this process may use
        job = Job(folder, nproc, backend, threads or share, os.getpid())
        job.path("call").write_bytes(encode_call(fn, args))
        if prepare is not None:
            job.path("prepare").write_bytes(encode_call(prepare, ()))
        try:
            _start(processes, job)
            _wait(processes, deadline)
            if failures := job.failures(processes):
                raise RankFailedError(_failures_text(failures, nproc), failures[0].rank)
            if late := [rank for rank, process in enumerate(processes) if process.exitcode is None]:
                raise LaunchTimeoutError(_stacks_text(job, processes, late, timeout))
        finally:
            _end(processes)
        return [torch.load(job.path("value", rank), weights_only=False) for rank in range(nproc)]


def _check(
    fn: object, nproc: object, backend: object, threads: object, timeout: object, prepare: object
) -> None:
    for name, function in (("fn to be callable", fn), ("prepare to be callable, or None", prepare)):
        if not callable(function) and (function is not None or function is fn):
            raise TypeError(f"expected {name}, got {type(function).__name__}")
    for name, value in (("nproc", nproc), ("threads", 1 if threads is None else threads)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"expected {name} to be at least 1, got {value}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"expected timeout to be a number of seconds above 0, or None, got {timeout!r}")
    if not isinstance(backend, str) or not dist.is_backend_available(backend):
        raise ValueError(f'this PyTorch has no backend {backend!r}: try "gloo"')
    if backend.startswith("nccl") and (count := torch.cuda.device_count()) < int(str(nproc)):
        raise ValueError(f"{backend} needs a GPU for each of {nproc} ranks, this host has {count}")


def _start(processes: list[BaseProcess], job: Job) -> None:
    """Start the ranks; each is in ``processes`` before, so that a Ctrl-C loses none."""
    # Starting a process starts the resource tracker first, which would unblock SIGINT for the ranks.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(job.nproc):
            processes.append(get_context("spawn").Process(target=enter, args=(rank, job)))
            processes[-1].start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(processes: Sequence[BaseProcess], deadline: float | None) -> None:
    grace: float | None = None
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        if grace is None and any(process.exitcode for process in processes):
            grace = monotonic() + _GRACE
        end = min((each for each in (deadline, grace) if each is not None), default=None)
        if (left := None if end is None else end - monotonic()) is not None and left <= 0:
            return
        wait(running, left)


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            with suppress(ProcessLookupError):  # not in a session of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        if process.pid is not None:  # else a Ctrl-C came before it started
            process.join()


def _failures_text(failures: Sequence[Failure], nproc: int) -> str:
    first, *others = failures
    text = f"failed:\n\n{first.text}" if "\n" in first.text else first.text
    more = ", ".join(f"rank {each.rank} ({each.line})" for each in others)
    return f"rank {first.rank} of {nproc} {text}" + (f"\n\nafterwards failed: {more}" if more else "")


def _stacks_text(job: Job, processes: list[BaseProcess], late: list[int], timeout: float | None) -> str:
    begun = {rank: pid for rank in late if (pid := processes[rank].pid) and job.path("begun", rank).exists()}
    stacks = stacks_of({rank: (pid, job.path("stacks", rank)) for rank, pid in begun.items()})
    lines = [f"no end after {timeout:g} s on rank {', '.join(map(str, late))} of {job.nproc}"]
    return "\n".join(lines + [f"\nrank {rank}, {stacks.get(rank, 'still starting')}" for rank in late])
