"""Ranks of which some stall: they stay away, are slow, killed or stopped. Each run has its own processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import sockets
from forked import fork_context
from waiting import wait_until
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.works import Work
from zero_optim.compat.engine import default_store
from zero_optim.errors import RemoteRankError
from zero_optim.health.verdicts import Verdicts
from zero_optim.run.host import use_loopback

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
) -> list[Outcome]:
    """Call ``function(*args)`` on some ranks in a gloo group, and tell how each one ends.

    The watchdog gives up no wait that takes too long until a rank calls `about_to_stall` or `stay_away`.
    """
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, store.port, pipe[1], sockets.ALONE, function, args))
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    began = time.monotonic()
    try:
        if meanwhile is not None:
            meanwhile(Others([process.pid or 0 for process in processes]))
        ended = []
        for process, (ours, _) in zip(processes, pipes, strict=True):
            said = None
            if ours.poll(max(0.0, began + limit - time.monotonic())):
                try:
                    said = ours.recv()
                except EOFError:
                    said = None
            process.join(max(0.1, began + limit - time.monotonic()))
            ended.append(Outcome(said, time.monotonic() - began, process.exitcode))
        return ended
    finally:
        for process, (ours, _) in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            ours.close()


def _rank(
    rank: int, size: int, port: int, result: Any, alone: bool, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    use_loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=4 * LIMIT)
    )
    judge_no_wait_before_the_trouble(dist.TCPStore("127.0.0.1", port, is_master=False))  # type: ignore[attr-defined]
    sockets.keep_to(alone)
    try:
        said = function(*args)
    except RemoteRankError as error:
        said = f"{type(error).__name__}: {error}"
    tell_end()
    result.send(said)
    result.close()
    os._exit(0)


@dataclass
class Trouble:
    """Whether the trouble of a run has begun, as this process knows it."""

    notes: Any = None
    has_begun: bool = False


_TROUBLE = Trouble()  # of this process, which is forked for one run


def judge_no_wait_before_the_trouble(notes: Any) -> None:
    """Have the watchdog give up no wait until `about_to_stall`, however slow the machine is until then."""
    judge, _TROUBLE.notes = Verdicts.judge_wait, notes

    def judge_later(verdicts: Verdicts, work: Work, seconds: float) -> None:
        _TROUBLE.has_begun = _TROUBLE.has_begun or notes.check([_STALLS])
        if _TROUBLE.has_begun:
            judge(verdicts, work, seconds)

    Verdicts.judge_wait = judge_later  # type: ignore[method-assign]


def about_to_stall() -> None:
    """Tell all ranks that from now on waits may pass their timeouts."""
    _TROUBLE.notes.set(_STALLS, "")


def tell_end(store: dist.Store | None = None) -> None:
    """Tell the ranks that stay away that this one has ended; by the default group's store, or another."""
    (store or default_store()).set(_OVER, "")


def stay_away(store: dist.Store | None = None) -> None:
    """Return when another rank has ended."""
    about_to_stall()
    wait_until(lambda: (store or default_store()).check([_OVER]))


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
