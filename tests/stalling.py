"""Ranks of which some stall: they stay away, are slow, killed or stopped. Each run has its own processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import sockets
from forked import fork_context
from processes import is_alive
from waiting import wait_until
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.works import Work
from zero_optim.errors import RemoteRankError
from zero_optim.health.verdicts import Verdicts
from zero_optim.run.rank import use_loopback

LIMIT = 200.0  # seconds that only a hang reaches: the timeouts are a few
TIMEOUT = 1.5  # of waits, where they are to pass
_OVER = "a rank has ended"  # in the store
_STALLS = "a rank is about to stall"


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    said: Any
    seconds: float
    exitcode: int | None


@dataclass(frozen=True)
class Others:
    """What a rank may do to others: it knows their processes."""

    pids: Sequence[int]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], signum)


def outcomes(
    size: int,
    function: Callable[..., Any],
    *args: object,
    meanwhile: Callable[[Others], object] | None = None,
    limit: float = LIMIT,
    as_script: bool = False,
    rank_0_has_store: bool = False,
) -> list[Outcome]:
    """Call ``function(*args)`` on some ranks in a gloo group, and tell how each one ends.

    The watchdog gives up no wait that takes too long until a rank calls `about_to_stall` or `stay_away`.

    Args:
        size: number of ranks, each a process of its own.
        function: what each rank does.
        *args: of it.
        meanwhile: what is done to the processes from here.
        limit: seconds that only a hang reaches.
        as_script: processes end as scripts do: what is no daemon thread keeps them.
        rank_0_has_store: the default group's store is in the process of rank 0, and ends or stops with it.
    """
    notes = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    run = _Run(size, notes.port, sockets.ALONE, as_script, rank_0_has_store, function, args)
    ranks = [_Process(run, rank) for rank in range(size)]
    began = time.monotonic()
    try:
        if meanwhile is not None:
            meanwhile(Others([rank.pid for rank in ranks]))
        return [rank.outcome(began, limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()


# Who starts a process polls all others. Of two threads that poll one that has ended, one gets exit code 255.
_POLLING = Lock()


class _Process:
    """A forked process that tells something."""

    def __init__(self, run: "_Run", rank: int) -> None:
        context = fork_context()
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=run.play, args=(rank, theirs))
        with _POLLING:
            self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def outcome(self, began: float, limit: float) -> Outcome:
        """Wait until it has ended by itself, or the limit has passed."""
        said, deadline = None, began + limit
        with suppress(EOFError):
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                said = self._pipe.recv()
        self._join(max(0.1, deadline - time.monotonic()))
        return Outcome(said, time.monotonic() - began, self._process.exitcode)

    def _join(self, seconds: float | None = None) -> None:
        wait([self._process.sentinel], seconds)
        with _POLLING:
            self._process.join(0)

    def end(self) -> None:
        """Leave nothing of it behind."""
        self._process.kill()
        self._join()
        self._pipe.close()


@dataclass(frozen=True)
class _Run:
    """What all ranks of a run know."""

    size: int
    port: int
    alone: bool
    as_script: bool
    rank_0_has_store: bool
    function: Callable[..., Any]
    args: tuple[object, ...]

    def play(self, rank: int, result: Connection) -> None:
        """Do what a rank does, in its process, and tell it."""
        torch.set_num_threads(1)
        use_loopback()
        notes = self._connected()
        dist.init_process_group(
            "gloo",
            store=self._store(rank, notes),
            rank=rank,
            world_size=self.size,
            timeout=timedelta(seconds=4 * LIMIT),
        )
        judge_no_wait_before_the_trouble(self._connected())
        sockets.keep_to(self.alone)
        try:
            said = self.function(*self.args)
        except RemoteRankError as error:
            said = f"{type(error).__name__}: {error}"
        notes.set(_OVER, "")
        result.send(said)
        result.close()
        if not self.as_script:
            os._exit(0)

    def _connected(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False)  # type: ignore[attr-defined]

    def _store(self, rank: int, notes: Any) -> Any:
        """Return the store of the default group."""
        key = "port of the store of rank 0"
        if not self.rank_0_has_store:
            return notes
        if rank == 0:
            own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            notes.set(key, str(own.port))
            return own
        return dist.TCPStore("127.0.0.1", int(notes.get(key)), is_master=False)  # type: ignore[attr-defined]


def let_go_on(others: Others) -> None:
    """Let the last rank go on when the first has ended."""
    let_rank_go_on(len(others.pids) - 1, others)


def let_rank_go_on(stopped: int, others: Others) -> None:
    """Let a rank that is stopped, if it is, go on when all others have ended."""
    left = [pid for rank, pid in enumerate(others.pids) if rank != stopped]
    wait_until(lambda: not any(map(is_alive, left)))
    with suppress(ProcessLookupError):  # it never came to the trouble
        others.kill(stopped, signal.SIGCONT)


@dataclass
class Trouble:
    """Whether the trouble of a run has begun, as this process knows it."""

    notes: Any = None
    has_begun: bool = False


_TROUBLE = Trouble()  # of this process, which is forked for one run


def judge_no_wait_before_the_trouble(notes: Any) -> None:
    """Have the watchdog give up no wait until `about_to_stall`, however slow the machine is until then."""
    judge, _TROUBLE.notes = Verdicts.look_at_wait, notes

    def judge_later(verdicts: Verdicts, work: Work, seconds: float) -> None:
        _TROUBLE.has_begun = _TROUBLE.has_begun or notes.check([_STALLS])
        if _TROUBLE.has_begun:
            judge(verdicts, work, seconds)

    Verdicts.look_at_wait = judge_later  # type: ignore[method-assign]


def about_to_stall() -> None:
    """Tell all ranks that from now on waits may pass their timeouts."""
    _TROUBLE.notes.set(_STALLS, "")


def stay_away() -> None:
    """Return when another rank has ended."""
    about_to_stall()
    wait_until(lambda: _TROUBLE.notes.check([_OVER]))


def note(name: str, value: str) -> None:
    """Tell all ranks something."""
    _TROUBLE.notes.set(name, value)


def noted(name: str) -> str | None:
    """What a rank has told, if it has."""
    return str(_TROUBLE.notes.get(name), "utf-8") if _TROUBLE.notes.check([name]) else None


def be_lost(how: str) -> None:
    """Be "killed" or "stopped", or stay "away" until another rank has ended."""
    about_to_stall()
    if how == "away":
        stay_away()
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])


@contextmanager
def begun_works() -> Iterator[list[Work]]:
    """Collect the works that begin in the body."""
    works: list[Work] = []
    begin = Work.__init__

    def recorded(work: Work, *args: Any, **options: Any) -> None:
        begin(work, *args, **options)
        works.append(work)

    with mock.patch.object(Work, "__init__", recorded):
        yield works


def linear(width: int = 4) -> nn.Module:
    """A model of two layers with names, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    """An optimizer for it, whose waits end after `TIMEOUT`."""
    options = {"timeout": TIMEOUT, **options}
    return ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1, **options)


def with_gradients(model: nn.Module) -> nn.Module:
    """The same model, with gradients of ones."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model
