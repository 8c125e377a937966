"""The works and calls of a process, by process group: what began, and why groups were given up.

No communication, but for `GroupWorks.cut`.

Note [Waits that end]
    Nothing can interrupt a thread that waits in C++. So waits have no limit, and to give up a group the
    watchdog breaks its connections (`GroupWorks.cut`). Each wait then raises, and `WorkLog.explain` says why.

Note [Groups that end]
    gloo closes a group's connections when nothing refers to it, and an error's traceback does, by the frames
    that waited. So nothing here keeps an error, and releasing ranks after a failed wait cuts all their groups
    (`WorkLog.cut_if_failed`), as a caller may keep it.
"""

import ctypes
import itertools
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_optim.comm.backends import aborts_of
from zero_optim.comm.unended import Paired, wait_and_poll
from zero_optim.compat.autograd import untraced
from zero_optim.compat.threads import start_thread_or_run
from zero_optim.errors import StalledError

if TYPE_CHECKING:
    from zero_optim.comm.sending import Levels
    from zero_optim.comm.works import Work
    from zero_optim.host.meeting import Met
    from zero_optim.host.messages import OneHost
    from zero_optim.host.several_hosts import SeveralHosts

OVERLAPPED_STEP = "an overlapped step"  # the name of one bucket's local step, on whichever thread
_NO_TAG = 2**31 - 1  # of messages that nobody sends
_FEW = 4  # works, among which it is not worth while to look for those that ended


@dataclass(slots=True)  # not frozen: each step makes two
class Mark:
    """The begin or end of a call or pass, its ``count``-th; the time is monotonic."""

    name: str
    count: int
    time: float
    is_over: bool


class Activity:
    """Counts of begun calls and passes in this process, the open ones, and the last mark."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.open: dict[str, Mark] = {}
        self.last: Mark | None = None

    @untraced
    def begin(self, name: str) -> None:
        """Record a begin."""
        count = self.counts[name] = self.counts.get(name, 0) + 1
        self.last = self.open[name] = Mark(name, count, time.monotonic(), is_over=False)

    @untraced
    def end(self, name: str) -> None:
        """Record an end."""
        self.open.pop(name, None)
        self.last = Mark(name, self.counts.get(name, 0), time.monotonic(), is_over=True)

    def report(self) -> tuple[dict[str, int], list[str]]:
        """Return the counts, and the outermost open call if any."""
        return dict(self.counts), [mark.name for mark in list(self.open.values())][:1]


@dataclass(frozen=True, slots=True)
class ActivityScope:
    """A context that names what this process does; untraced, for compiled steps."""

    activity: Activity
    name: str

    @untraced
    def __enter__(self) -> None:
        self.activity.begin(self.name)

    @untraced
    def __exit__(self, *_: object) -> None:
        self.activity.end(self.name)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group was given up, and the missing group ranks; equal on all its ranks."""

    message: str
    missing: tuple[int, ...] = ()

    def error(self) -> StalledError:
        """Build the exception."""
        return StalledError(self.message, self.missing)


class GroupWorks:
    """The works of one process group in this process, with a weak reference to it.

    ``limit``: the timeout in seconds. ``verdict``: why the group was given up. ``tags``: of exchanges in
    parts. ``apart``: sends and receives the backend counted, less one for each exchange. ``pending``: works
    of the CPU that may run, or failed. ``outstanding``: the one pending work of a device.
    """

    def __init__(
        self,
        log: "WorkLog",
        process_group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        limit: timedelta | None,
        *,
        can_cut: bool,
    ) -> None:
        self.log = log
        self.ranks = ranks
        self.limit = float("inf") if limit is None else limit.total_seconds()
        self.verdict = log.verdicts.get(log.wholes.get(ranks, ranks))
        self.has_failed = False
        self.tags = itertools.count(1)
        self.apart = 0
        self.outstanding: Work | None = None
        self.pending = set["Work"]()
        self.drops_from = _FEW
        self.group = weakref.ref(process_group, self._let_go)
        self.memory: OneHost | SeveralHosts | None = None  # that the ranks share
        self.why_no_memory: str | None = None
        self.met: Met | None = None  # which ranks are on which hosts
        self.levels: Levels | None = None  # of what does not go through memory
        self.beside: list[GroupWorks] = []  # of groups of some of these ranks, inside hosts and across
        self._can_cut = can_cut

    def __del__(self) -> None:
        self.let_memory_go()  # a thread refers to it while calls are pending

    def _let_go(self, _group: object) -> None:
        self.pending.clear()  # the works keep connections
        self.let_memory_go()

    def let_memory_go(self) -> None:
        """Take part in calls through memory no more; its pages go back."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.release()
            self.drop_ended()  # calls through it keep it

    @property
    def whole(self) -> tuple[int, ...]:
        """Global ranks given up with this group: its mesh's, or its own."""
        return self.log.wholes.get(self.ranks, self.ranks)

    @property
    def failure(self) -> str:
        """What the last step of these ranks, or of their mesh, raised here, if no gather tells it."""
        return self.log.failures.get(self.whole, "")

    @untraced
    def note_failure(self, failure: str) -> None:
        """Record what the last step raised; an empty text if nothing, or if the ranks will hear of it."""
        whole = self.log.wholes.get(self.ranks, self.ranks)
        if self.log.failures.get(whole, "") != failure:
            self.log.failures[whole] = failure

    def drop_ended(self) -> None:
        """Drop works that have ended, which nobody may ever wait for, when their number has doubled."""
        for work in list(self.pending) if self.verdict is None and not self.has_failed else ():
            if work.waiting_since is None and work.handles and work.is_completed():
                self.pending.discard(work)
        self.drops_from = max(_FEW, 2 * len(self.pending))

    def cut(self) -> None:
        """Break the group's connections, on any thread: Note [Waits that end]."""
        group = self.group()
        if group is None:
            return
        if self.memory is not None:
            self.memory.close("Connection closed: the process group was given up")
        for works in self.beside:
            works.cut()
        for abort in aborts_of(group):  # each may take long
            start_thread_or_run(partial(_attempt, abort), "zero_optim abort")
        # gloo breaks them when a receive times out, but not from a rank that has ended: each rank is tried.
        for other in range(len(self.ranks) if self._can_cut else 0):
            if other == group.rank():
                continue
            with suppress(RuntimeError, ValueError):  # that it took too long, or that it was broken before
                work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, _NO_TAG)
                work.wait(timedelta(milliseconds=1))

    def wait_for(self, handle: Any) -> bool:  # noqa: ANN401 - a work of gloo, or sends and receives
        """Wait for gloo's collective or sends; StalledError if the group was given up."""
        if wait_and_poll(handle, lambda: self.verdict is not None):
            return True
        group = self.group()
        if group is not None and not isinstance(handle, Paired):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # until the process ends
        assert self.verdict is not None  # the group was given up, for good
        raise self.verdict.error()

    def check(self) -> None:
        """Raise StalledError if the group was given up."""
        if self.verdict is not None:
            raise self.verdict.error()


def _attempt(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the backend cannot, or has ended
        abort()


def explain_nothing(_work: "Work", _error: RuntimeError) -> None:
    """Return None: there is no watchdog."""


@dataclass(slots=True, eq=False)
class WorkLog:
    """The works of this process, as long as the default group lives.

    ``groups``: by id; other threads add to it. ``verdicts``: by the ranks of a group given up. ``wholes``:
    ranks of a part of a mesh -> all its ranks, which share a verdict. ``failures``: of steps, by those ranks.
    ``explain``: returns the exception for a backend's error; None if its own message is best.
    """

    activity: Activity = field(default_factory=Activity)
    groups: dict[int, GroupWorks] = field(default_factory=dict)
    verdicts: dict[tuple[int, ...], Verdict] = field(default_factory=dict)
    wholes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    failures: dict[tuple[int, ...], str] = field(default_factory=dict)
    shares_memory: bool = True
    explain: Callable[["Work", RuntimeError], Exception | None] = explain_nothing

    def of(
        self,
        process_group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        limit: timedelta | None,
        *,
        can_cut: bool,
    ) -> GroupWorks:
        """Return the works of a group; arguments as of `GroupWorks`."""
        known = self.groups.get(id(process_group))
        if known is not None and known.group() is process_group:
            return known
        for key, works in list(self.groups.items()):
            if works.group() is None:
                self.groups.pop(key, None)
        works = GroupWorks(self, process_group, ranks, limit, can_cut=can_cut)
        self.groups[id(process_group)] = works
        return works

    def waits(self) -> "list[Work]":
        """Return the works that a thread waits for."""
        pending = (work for works in list(self.groups.values()) for work in list(works.pending))
        return [work for work in pending if work.waiting_since is not None]

    def give_up(self, ranks: tuple[int, ...], verdict: Verdict) -> Verdict:
        """Allow no more works on groups of some ranks; returns the first verdict, which holds."""
        holds = self.verdicts.setdefault(ranks, verdict)
        for works in list(self.groups.values()):
            if works.whole == ranks:
                works.verdict = holds
        return holds

    def cut_if_failed(self, ranks: tuple[int, ...]) -> None:
        """Cut all groups of some ranks after a failed wait; the caller is releasing the ranks."""
        of_ranks = [works for works in list(self.groups.values()) if works.ranks == ranks]
        if any(works.has_failed or works.verdict is not None for works in of_ranks):
            for works in of_ranks:
                works.cut()


# By the default group. PyTorch keeps that in a global, so this has to be one too. Weak, so that it ends with
# it.
_LOGS: WeakKeyDictionary[dist.ProcessGroup, WorkLog] = WeakKeyDictionary()


def log_of(world: dist.ProcessGroup) -> WorkLog:
    """Return the log of this process, by the default group."""
    known = _LOGS.get(world)
    if known is not None:
        return known
    for other, log in list(_LOGS.items()):
        if other is not world:  # destroyed, but somebody refers to it, such as PyTorch's caches of meshes
            for works in list(log.groups.values()):
                works.let_memory_go()
    return _LOGS.setdefault(world, WorkLog())
