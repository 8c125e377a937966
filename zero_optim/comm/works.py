"""Started collectives, and the works of each process group in this process. No communication.

A *work* is a collective with a `Record`, which has no tensor. The *ring* has the last `KEPT` records.

Note [Waits that end]
    Nothing can interrupt a thread that waits in C++. gloo cannot wait for sends and receives in slices: a
    timeout breaks all connections of the group. So waits have no limit, and to give up a group the watchdog
    breaks its connections from another thread (`GroupWorks.cut`). Each wait then raises, and
    `WorkLog.explain` says why.

Note [Groups that end]
    gloo closes a group's connections when nothing refers to it. An error's traceback does, by the frames that
    waited, in a cycle until garbage is collected, while other ranks wait. So nothing here keeps an error. A
    caller may: so releasing ranks after a failed wait cuts all their groups (`WorkLog.cut_if_failed`).

Note [Works that outlive the interpreter]
    The last reference to a work releases its tensors, which takes the GIL. If gloo's thread does that while
    Python ends, Python ends the thread inside a destructor, and the process aborts (exit status 134). It was
    seen after a wait was given up: the thread had just told the waiting one of the failure. So works that did
    not end well are kept as long as their group, or until Python's modules are gone, when PyTorch takes no
    GIL any more.
"""

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_optim.comm.backends import aborts_of
from zero_optim.comm.records import Activity, Record, Verdict
from zero_optim.comm.threads import start_thread
from zero_optim.comm.traffic import Phase, Waitable
from zero_optim.comm.unended import Paired, keep_for_ever, wait_and_poll
from zero_optim.compat.streams import Event, is_capturing, recorded_event, wait_for_event

KEPT = 512  # records in the ring
_NO_TAG = 2**31 - 1  # of messages that nobody sends


class Work:
    """A started collective: the backend's handle or a future, its record, and its counted waits.

    ``late_on``: the device that runs it while the CPU goes on. ``polls``: Note [Waits that nothing ends].
    """

    __slots__ = ("_phase", "_polls", "handle", "late_on", "record")

    def __init__(
        self,
        handle: Waitable,
        phase: Phase,
        record: Record,
        *,
        late_on: torch.device | None = None,
        polls: bool = False,
    ) -> None:
        self.handle = handle
        self.late_on = late_on
        self._polls = polls
        self._phase = phase
        self.record = record
        if late_on is None:
            record.group.pending.add(self)
        elif record.group.outstanding is None and not is_capturing(late_on):
            record.group.outstanding = self

    def wait(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - what the handle gives
        """Wait with the caller, or on an accelerator with the current stream.

        ``timeout`` replaces the work's. StalledError if a rank is late or has ended.
        """
        if timeout is not None:
            self.record.timeout = timeout
        with self._phase.held_up(), self.record.waiting():
            if self._polls and isinstance(self.handle, dist.Work | Paired):
                result: Any = self.record.group.wait_for(self.handle)
            else:
                result = self.handle.wait()
        self.record.group.pending.discard(self)
        if self.record.group.outstanding is self and self.late_on is not None:
            self._let_go(self.late_on)
        return result

    def _let_go(self, device: torch.device) -> None:
        """Replace the handle, which keeps tensors, by an event; a capture has no event to query."""
        if is_capturing(device):
            self.record.group.outstanding = None
        else:
            self.handle = _AfterWait(device, recorded_event(device))

    def is_completed(self) -> bool:
        """Return whether it ended, also by failure. gloo's sends and receives end in a wait."""
        handle: Any = self.handle
        try:
            return bool(handle.done() if isinstance(handle, torch.futures.Future) else handle.is_completed())
        except RuntimeError:  # of a device that has failed
            return True

    def exception(self) -> Exception | None:
        """Return its failure or its group's error; None if it went well or is pending. No wait.

        The error has no frames: Note [Groups that end].
        """
        failure = self._failure() if self.is_completed() else None
        verdict = self.record.group.verdict
        return failure if failure is None or verdict is None else verdict.error()

    def _failure(self) -> Exception | None:
        handle: Any = self.handle
        with suppress(AttributeError, TypeError):  # a future has none; PyTorch 2.8 cannot hand it out
            failure = handle.exception()
            if isinstance(failure, Exception):
                return failure
        if self.late_on is None:  # else a stream would wait
            try:
                handle.wait()
            except Exception as error:  # noqa: BLE001 - returned, not raised
                return error.with_traceback(None)
        return None


class _AfterWait:
    """The handle of a collective that a stream waits for; it keeps no tensors."""

    def __init__(self, device: torch.device, event: Event) -> None:
        self._device = device
        self.event = event

    def wait(self) -> None:
        wait_for_event(self._device, self.event)

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def exception(self) -> Exception | None:
        """Return the device's failure; only the backend's own handle has the backend's."""
        try:
            self.event.query()
        except RuntimeError as error:
            return error.with_traceback(None)
        return None


class GroupWorks:
    """The works of one process group in this process, with a weak reference to it.

    ``limit``: the timeout in seconds. ``verdict``: why the group was given up; no work begins any more.
    ``has_failed``: a wait raised the backend's error. ``tags``: message numbers of exchanges in parts, equal
    on all ranks. ``apart``: sends and receives the backend counted, less one for each exchange.
    ``outstanding``: the one pending work of a device (they end in order). ``pending``: works of the CPU that
    nobody has waited for, or that failed: Note [Works that outlive the interpreter].
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
        self.pending = pending = set[Work]()
        self.group = weakref.ref(process_group, lambda _: pending.clear())  # the works keep connections
        self._numbers = itertools.count(1)
        self._can_cut = can_cut

    @property
    def whole(self) -> tuple[int, ...]:
        """Global ranks given up with this group: its mesh's, or its own."""
        return self.log.wholes.get(self.ranks, self.ranks)

    def cut(self) -> None:
        """Break the group's connections, on any thread: Note [Waits that end].

        gloo breaks them when a receive times out, but not from a rank known to have ended, so each rank is
        tried. Other backends have an abort, after which the device and the CPU go on.
        """
        group = self.group()
        if group is None:
            return
        for abort in aborts_of(group):  # each may take long
            start_thread(partial(_attempt, abort), "zero_optim abort")
        for other in range(len(self.ranks) if self._can_cut else 0):
            if other == group.rank():
                continue
            with suppress(RuntimeError, ValueError):  # that it took too long, or that it was broken before
                work = group.recv([torch.empty(1, dtype=torch.uint8)], other, _NO_TAG)
                work.wait(timedelta(milliseconds=1))

    def wait_for(self, handle: dist.Work | Paired) -> bool:
        """Wait for gloo's collective or sends; StalledError if the group was given up."""
        if wait_and_poll(handle, lambda: self.verdict is not None):
            return True
        group = self.group()
        if group is not None and not isinstance(handle, Paired):
            keep_for_ever(group)
        assert self.verdict is not None  # the group was given up, for good
        raise self.verdict.error()

    def begin(self, phase: Phase, about: str = "") -> Record:
        """Begin a work; StalledError if the group was given up."""
        if self.verdict is not None:
            raise self.verdict.error()
        timeout = self.limit if phase.timeout is None else phase.timeout
        record = Record(self, next(self._numbers), phase.name, about, timeout, time.monotonic())
        self.log.ring.append(record)
        return record


def explained(works: GroupWorks | None, error: RuntimeError) -> Exception | None:
    """Explain a failed future of the backend; None if its own message is best. May take seconds."""
    if works is None:
        return None
    if works.verdict is not None:
        return works.verdict.error()
    return works.log.explain(works.begin(Phase(name="reduce")), error)


def _attempt(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the backend cannot, or has ended
        abort()


def explain_nothing(_record: Record, _error: RuntimeError) -> None:
    """Return None: there is no watchdog."""


@dataclass(slots=True, eq=False)
class WorkLog:
    """The works of this process, as long as the default group lives.

    ``ring``: the last works, newest last. ``waits``: works that a thread waits for. ``groups``: works by id
    of the group; other threads add to it. ``verdicts``: by the ranks of a group given up. ``wholes``: ranks
    of a part of a mesh -> all its ranks, which share a verdict. ``explain``: returns the exception for a
    backend's error; None if its own message is best.
    """

    ring: deque[Record] = field(default_factory=lambda: deque(maxlen=KEPT))
    waits: dict[int, Record] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)
    groups: dict[int, GroupWorks] = field(default_factory=dict)
    verdicts: dict[tuple[int, ...], Verdict] = field(default_factory=dict)
    wholes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    explain: Callable[[Record, RuntimeError], Exception | None] = explain_nothing

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
        made = self.groups[id(process_group)] = GroupWorks(self, process_group, ranks, limit, can_cut=can_cut)
        return made

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


def noted_of(group: dist.ProcessGroup) -> GroupWorks | None:
    """Return the works of a group, if recorded."""
    world = dist.group.WORLD
    found = None if world is None else log_of(world).groups.get(id(group))
    return found if found is not None and found.group() is group else None


def log_of(world: dist.ProcessGroup) -> WorkLog:
    """Return the log of this process, by the default group."""
    found = _LOGS.get(world)
    return _LOGS.setdefault(world, WorkLog()) if found is None else found
