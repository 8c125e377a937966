"""Runs functions on several ranks at once, on worker processes that are started once and kept.

Starting a process that imports torch takes seconds, a process group takes milliseconds. So the processes live
as long as the test session, and every call gets a process group of its own: no test sees another test's
sub-groups, operation counters or unfinished collectives. What else a call can leave behind (random state,
default dtype, warning filters) is set anew before the next one.

A rank that fails or hangs may leave its peers anywhere. The processes of such a call are killed, and the next
call starts new ones in their place.

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

import torch.distributed as dist

import pool_worker
from pool_worker import Failure, Filter, Reply, Request, Success
from zero_optim.run.stacks import stacks_of

T = TypeVar("T")

# In seconds, and enough for a machine that has much else to do: what goes well does not wait for them.
CALL_TIMEOUT = 180.0  # for a call that says nothing else
START_TIMEOUT = 240.0  # for a fresh process to import torch
PEER_GRACE = 3.0  # that the others get to report too, once one rank has failed; this one is waited for
END_TIMEOUT = 30.0  # for a process whose pipe is closed to end


class RankError(AssertionError):
    """A call failed on some ranks. The message holds what each of them reported.

    Attributes:
        reports: by rank, the traceback of a rank that raised, or the stack of one that was still running.
    """

    def __init__(self, headline: str, reports: dict[int, str]) -> None:
        self.reports = reports
        parts = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([headline, *parts]))


class RankTimeoutError(RankError):
    """A call did not end in time. The message holds the stack of every rank that was still running."""


@dataclass(frozen=True)
class Ranks:
    """A pool at a fixed world size: what the fixtures hand to tests."""

    pool: "Pool"
    size: int

    def run(self, function: Callable[..., T], *args: object, timeout: float = CALL_TIMEOUT) -> list[T]:
        """Calls ``function(*args)`` on every rank; see ``Pool.run``."""
        __tracebackhide__ = True
        return self.pool.run(self.size, function, *args, timeout=timeout)


class Pool:
    """Worker processes for any world size: rank r of a call runs on worker r.

    Args:
        context: how they start: spawned, or forked from a server, see ``forked``. Not forked from here, which
            does not go with torch's threads.
    """

    def __init__(self, context: BaseContext | None = None) -> None:
        # Spawned processes differ in how they hash strings, as the ranks of a real run do, so that tests see
        # it if ranks go through a set each in its own order. Forked ones do not, but start in milliseconds.
        self._context = context or multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="zero-optim-ranks-")
        # Port 0: the system picks a free one, so that several test runs go side by side.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._workers: dict[int, _Worker] = {}
        self._calls = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every worker. The pool cannot be used afterwards."""
        self._kill(list(self._workers))
        self._folder.cleanup()

    def run(
        self, world_size: int, function: Callable[..., T], *args: object, timeout: float = CALL_TIMEOUT
    ) -> list[T]:
        """Calls ``function(*args)`` on every rank, inside a gloo default process group, and waits for all.

        Args:
            world_size: how many ranks.
            function: a function at the top level of a test module: it travels by name.
            *args: the same for every rank; pickled, as are the values that come back.
            timeout: seconds for the call, not counting the start of the processes.

        Returns:
            What the function returned, by rank.

        Raises:
            RankError: it raised on some rank, or a rank's process died.
            RankTimeoutError: it took longer than ``timeout`` on some rank.
        """
        __tracebackhide__ = True
        ranks = range(world_size)
        self._calls += 1
        call = pickle.dumps((function, args))
        filters = _warning_filters()
        try:
            self._start([rank for rank in ranks if rank not in self._workers])
            for rank in ranks:
                group_name = f"call-{self._calls}"
                # The group outlives the call's limit, so that it is the hang that gets reported, with stacks.
                limit = timeout + 60.0
                request = Request(call, rank, world_size, group_name, limit, filters)
                self._workers[rank].connection.send_bytes(pickle.dumps(request))
            replies = self._collect(ranks, timeout)
            if len(replies) == world_size and not any(
                isinstance(reply, Failure) for reply in replies.values()
            ):
                for rank in ranks:
                    self._workers[rank].connection.send_bytes(b"end")
                replies = self._collect(ranks, timeout)
            values = {rank: reply.value for rank, reply in replies.items() if isinstance(reply, Success)}
            if len(values) == world_size:
                return [pickle.loads(values[rank]) for rank in ranks]
            failures = {rank: reply.text for rank, reply in replies.items() if isinstance(reply, Failure)}
            stacks = self._stacks([rank for rank in ranks if rank not in replies])
        except BaseException:  # Ctrl-C among others: nobody knows where the ranks are now
            self._kill(ranks)
            raise
        self._kill(ranks)
        name = f"{function.__module__}.{function.__qualname__}"
        if failures:
            raise RankError(f"{name} failed on rank {_listed(failures)} of {world_size}", failures | stacks)
        raise RankTimeoutError(
            f"{name} did not end within {timeout:g} s on rank {_listed(stacks)} of {world_size}", stacks
        )

    def _start(self, ranks: Sequence[int]) -> None:
        """Starts a worker for each rank, all at once, and waits until they listen."""
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
        """Waits for the replies; those of ranks that are late are missing from the result."""
        waiting = {self._workers[rank].connection: rank for rank in ranks}
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                replies[rank] = self._reply(rank)
                if isinstance(replies[rank], Failure):
                    deadline = min(deadline, time.monotonic() + PEER_GRACE)
        return replies

    def _reply(self, rank: int) -> Reply:
        worker = self._workers[rank]
        try:
            reply = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join(END_TIMEOUT)
            return Failure(f"the process died with exit code {worker.process.exitcode}\n{worker.stacks()}")
        assert isinstance(reply, Reply)
        return reply

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Asks the workers where they are."""
        workers = {rank: self._workers[rank] for rank in ranks}
        texts = stacks_of({rank: (worker.pid, worker.stack_file) for rank, worker in workers.items()})
        return {rank: f"still running, most recent call first:\n{text}" for rank, text in texts.items()}

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
    """One process, this side's end of the pipe to it, and the file that it writes its stack to when asked."""

    process: multiprocessing.process.BaseProcess
    connection: "Connection[Any, Any]"
    stack_file: Path

    @classmethod
    def start(cls, context: BaseContext, stack_file: Path, store_port: int) -> "_Worker":
        ours, theirs = context.Pipe()
        args = (theirs, stack_file, store_port)
        process = context.Process(target=pool_worker.serve, args=args, daemon=True)
        process.start()
        theirs.close()  # the worker has the other end alone now, so its death reads as end of file here
        return cls(process, ours, stack_file)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def stacks(self) -> str:
        return self.stack_file.read_text(errors="replace") if self.stack_file.exists() else ""


def _warning_filters() -> list[Filter]:
    """The filters in force here, pytest's configuration and the test's own marks included, fit to be sent."""

    def pattern(text: Any) -> str:
        return str(getattr(text, "pattern", text or ""))

    return [
        Filter(action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _listed(ranks: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(ranks)))
