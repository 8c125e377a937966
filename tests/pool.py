"""Runs functions on several ranks at once, in worker processes that all tests share.

Starting a process that imports torch takes seconds, a process group takes milliseconds. So the processes live
as long as the test session, and every call gets its own process group. No test sees subgroups, operation
counters or unfinished collectives of another test. Random state, default dtype and warning filters are reset
before each call.

If a rank fails or hangs, the others may be stuck. So the processes of such a call are killed, and the next
call starts new ones.

    test process                        worker 0 .. n-1
    Pool.run(n, function, *args) -----> init_process_group, function(*args)
                                  <---- value or traceback
                      all returned ---> destroy_process_group
                      [value, ..] <---- value or traceback, of a destructor for example
"""

import multiprocessing
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

import pool_worker
import sockets
from pool_worker import Filter, Reply, Request
from zero_optim.run.stacks import stacks_of

T = TypeVar("T")

# In seconds, long enough for a busy machine. A call that succeeds does not wait for them.
CALL_TIMEOUT = 180.0  # of a call, if it gives no other
START_TIMEOUT = 240.0  # for a fresh process to import torch
PEER_GRACE = 3.0  # for the other ranks to report, after one has failed; it passes in full if one hangs
END_TIMEOUT = 30.0  # for a process whose pipe is closed to end
DEATH_CHECK = 1.0  # between two looks whether a process has ended that does not reply


class RankError(AssertionError):
    """A call failed on some ranks. The message holds the report of each rank."""

    def __init__(self, headline: str, reports: dict[int, str]) -> None:
        self.reports = reports
        parts = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([headline, *parts]))


class RankTimeoutError(RankError):
    """A call did not end in time. The message holds the stack of every rank that was still running."""


@dataclass(frozen=True)
class Ranks:
    """A pool with a fixed world size; the fixtures give it to tests."""

    pool: "Pool"
    size: int

    def run(self, function: Callable[..., T], *args: object, timeout: float = CALL_TIMEOUT) -> list[T]:
        """Calls ``function(*args)`` on every rank; see ``Pool.run``."""
        __tracebackhide__ = True
        return self.pool.run(self.size, function, *args, timeout=timeout)


def on_ranks(
    *sizes: int, slow: int | None = None, forked: bool = False, timeout: float = CALL_TIMEOUT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test function on every rank of one or more world sizes; ``conftest`` does it.

    The arguments of the function, fixtures too, are pickled, and are equal on every rank.
    """
    fixture = "forked_pool" if forked else "pool"

    def marked(function: Callable[..., None]) -> Callable[..., None]:
        marks = pytest.mark.on_ranks(sizes, slow, fixture, timeout), pytest.mark.usefixtures(fixture)
        return marks[0](marks[1](function))

    return marked


class Pool:
    """Worker processes for any world size: rank r of a call runs on worker r."""

    def __init__(self, context: BaseContext | None = None, device: str = "cpu") -> None:
        # Spawned processes hash strings differently, as the ranks of a real run do. So tests notice code that
        # goes through a set in another order on each rank. Forked processes hash equally, but start in
        # milliseconds.
        self._context = context or multiprocessing.get_context("spawn")
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="zero-optim-ranks-")
        # Port 0: the system picks a free port, so several test runs can run at the same time.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._workers: dict[int, _Worker] = {}
        self._calls = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers. The pool cannot be used after this."""
        self._kill(list(self._workers))
        self._folder.cleanup()

    def run(
        self, world_size: int, function: Callable[..., T], *args: object, timeout: float = CALL_TIMEOUT
    ) -> list[T]:
        """Calls ``function(*args)`` on every rank, inside a gloo default process group, and waits for all."""
        __tracebackhide__ = True
        ranks = range(world_size)
        self._calls += 1
        call = pickle.dumps((function, args))
        filters = _warning_filters()
        try:
            self._start([rank for rank in ranks if rank not in self._workers])
            for rank in ranks:
                group_name = f"call-{self._calls}"
                # The group's timeout is longer than the call's, so a hang is reported with stacks.
                limit = timeout + 60.0
                request = Request(
                    call, rank, world_size, group_name, limit, filters, self._device, sockets.ALONE
                )
                self._workers[rank].connection.send_bytes(pickle.dumps(request))
            replies = self._collect(ranks, timeout)
            if len(replies) == world_size and not any(reply.failure for reply in replies.values()):
                for rank in ranks:
                    self._workers[rank].connection.send_bytes(b"end")
                replies = self._collect(ranks, timeout)
            failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
            if len(replies) == world_size and not failures:
                return [pickle.loads(replies[rank].value) for rank in ranks]
            stacks = self._stacks([rank for rank in ranks if rank not in replies])
        except BaseException:  # for example Ctrl-C: the ranks may be anywhere now
            self._kill(ranks)
            raise
        self._kill(ranks)
        name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        if failures:
            raise RankError(f"{name} failed on rank {_listed(failures)} of {world_size}", failures | stacks)
        raise RankTimeoutError(
            f"{name} did not end within {timeout:g} s on rank {_listed(stacks)} of {world_size}", stacks
        )

    def _start(self, ranks: Sequence[int]) -> None:
        """Starts a worker for each rank, all at the same time, and waits until they listen."""
        for rank in ranks:
            stack_file = Path(self._folder.name) / f"rank-{rank}.stacks"
            self._workers[rank] = _Worker.start(self._context, stack_file, self._store.port)
        deadline = time.monotonic() + START_TIMEOUT
        for rank in ranks:
            worker = self._workers[rank]
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the worker of rank {rank} did not start within {START_TIMEOUT:g} s")
            worker.connection.recv_bytes()

    def _collect(self, ranks: Sequence[int], timeout: float) -> dict[int, Reply]:
        """Waits for the replies. The result has no reply of ranks that are too late."""
        waiting = {self._workers[rank].connection: rank for rank in ranks}
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), min(max(0.0, left), DEATH_CHECK))
            # The pipe of a process that has ended stays open as long as a process that it has forked.
            ready = ready or [pipe for pipe, rank in waiting.items() if self._workers[rank].has_ended]
            if not ready and left <= 0:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                replies[rank] = self._reply(rank)
                if replies[rank].failure:
                    deadline = min(deadline, time.monotonic() + PEER_GRACE)
        return replies

    def _reply(self, rank: int) -> Reply:
        worker = self._workers[rank]
        try:
            if worker.has_ended and not worker.connection.poll():
                raise EOFError
            reply = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join(END_TIMEOUT)
            stacks = worker.stack_file.read_text(errors="replace") if worker.stack_file.exists() else ""
            return Reply(failure=f"the process died with exit code {worker.process.exitcode}\n{stacks}")
        assert isinstance(reply, Reply)
        return reply

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Asks the workers for their stacks."""
        workers = {rank: self._workers[rank] for rank in ranks}
        texts = stacks_of({rank: (worker.pid, worker.stack_file) for rank, worker in workers.items()})
        return {rank: f"has not replied, {text}" for rank, text in texts.items()}

    def _kill(self, ranks: Sequence[int]) -> None:
        workers = [self._workers.pop(rank) for rank in ranks if rank in self._workers]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()


@dataclass(frozen=True)
class _Worker:
    """One process, our end of the pipe to it, and the file to which it writes its stack when asked."""

    process: multiprocessing.process.BaseProcess
    connection: "Connection[Any, Any]"
    stack_file: Path

    @classmethod
    def start(cls, context: BaseContext, stack_file: Path, store_port: int) -> "_Worker":
        ours, theirs = context.Pipe()
        args = (theirs, stack_file, store_port)
        process = context.Process(target=pool_worker.serve, args=args, daemon=True)
        process.start()
        theirs.close()  # now only the worker has the other end, so its death is an end of file here
        return cls(process, ours, stack_file)

    @property
    def has_ended(self) -> bool:
        return not self.process.is_alive()

    @property
    def pid(self) -> int:
        return self.process.pid


def _warning_filters() -> list[Filter]:
    """The warning filters of this process (pytest's configuration, the test's marks), made picklable."""

    def pattern(text: Any) -> str:
        return str(getattr(text, "pattern", text or ""))

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _listed(ranks: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(ranks)))
