"""Works: what each process keeps of a collective until its end, by process group. No communication.

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
    seen after a wait was given up: the thread had just told the waiting one of the failure. So works are
    kept until they have ended, once one has failed as long as their group, or until Python's modules are
    gone, when PyTorch takes no GIL any more.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_optim.comm.backends import aborts_of, raised_by_backend
from zero_optim.comm.records import Activity, Verdict
from zero_optim.comm.threads import start_thread
from zero_optim.comm.traffic import Phase, Waitable
from zero_optim.comm.unended import Paired, keep_for_ever, wait_and_poll
from zero_optim.compat.engine import is_profiling
from zero_optim.compat.streams import Event, is_capturing, recorded_event, wait_for_event
from zero_optim.errors import ZeroOptimError

_NO_TAG = 2**31 - 1  # of messages that nobody sends
_FEW = 4  # works, among which it is not worth while to look for those that ended

# How a work is named in messages, by its phase.
_NOUNS = {
    "gather": "the gather",
    "reduce": "the reduction",
    "clip": "the norm for clip_grad_norm_()",
    "agree": "an agreement",
    "order": "an agreement on the order",
    "state": "the exchange of optimizer state",
    "checkpoint": "the exchange of a checkpoint",
    "buffers": "the broadcast of the model's buffers",
}


class Work:
    """One or more calls of the backend that are waited for together, from their begin on.

    ``handles``: of the backend, or a future; set once they have started. ``about``: such as
    ``bucket 3 (layers.7.weight, …)``, or empty. ``runs_hook``: a comm hook may raise in it. ``late_on``: the
    device that runs it while the CPU goes on. ``polls``: Note [Waits that nothing ends]. Times are in
    seconds, of `time.monotonic`.
    """

    __slots__ = (
        "_polls",
        "about",
        "group",
        "handles",
        "is_warned",
        "late_on",
        "phase",
        "runs_hook",
        "started",
        "timeout",
        "waiting_since",
    )

    def __init__(
        self,
        group: "GroupWorks",
        phase: Phase,
        about: str = "",
        *,
        late_on: torch.device | None = None,
        polls: bool = False,
        runs_hook: bool = False,
    ) -> None:
        self.group = group
        self.phase = phase
        self.about = about
        self.late_on = late_on
        self._polls = polls
        self.runs_hook = runs_hook
        self.handles: Sequence[Waitable] = ()
        self.timeout = group.limit if phase.timeout is None else phase.timeout
        self.started = time.monotonic()
        self.waiting_since: float | None = None
        self.is_warned = False

    @property
    def text(self) -> str:
        """Return its name in messages."""
        noun = _NOUNS.get(self.phase.name, f"a collective ({self.phase.name})")
        return f"{noun} of {self.about}" if self.about else noun

    @property
    def label(self) -> str:
        """Return its name for a profiler."""
        bucket = self.about.partition(" (")[0]
        return f"zero_optim.{self.phase.name} {bucket}" if bucket else f"zero_optim.{self.phase.name}"

    def waited(self, now: float) -> float:
        """Return the seconds that a thread has waited."""
        since = self.waiting_since
        return 0.0 if since is None else now - since

    def starting(self) -> "_InBackend":
        """Return a context in which the backend starts the calls."""
        return _InBackend(self, ends=False)

    def waiting(self) -> "_InBackend":
        """Return a context in which the caller waits for the calls, the last time."""
        return _InBackend(self, ends=True)

    def take(self, *handles: Waitable) -> "Work":
        """Take the handles of the calls that have started; returns itself."""
        self.handles = handles
        if self.late_on is not None and self.group.outstanding is None and not is_capturing(self.late_on):
            self.group.outstanding = self
        return self

    def wait(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - what the last handle gives
        """Wait with the caller, or on an accelerator with the current stream.

        ``timeout`` replaces the work's. StalledError if a rank is late or has ended.
        """
        if timeout is not None:
            self.timeout = timeout
        result: Any = None
        with self.phase.held_up(), _InBackend(self, ends=True):
            for handle in self.handles:
                result = self.group.wait_for(handle) if self._polls else handle.wait()
        if self.group.outstanding is self and self.late_on is not None:
            self._let_go(self.late_on)
        return result

    def _let_go(self, device: torch.device) -> None:
        """Replace the handles, which keep tensors, by an event; a capture has no event to query."""
        if is_capturing(device):
            self.group.outstanding = None
        else:
            self.handles = (_AfterWait(device, recorded_event(device)),)

    def is_completed(self) -> bool:
        """Return whether it ended, also by failure. gloo's sends and receives end in a wait."""
        handles: Sequence[Any] = self.handles
        try:
            return all(
                handle.done() if hasattr(handle, "done") else handle.is_completed()  # a future has the former
                for handle in handles
            )
        except RuntimeError:  # of a device that has failed
            return True

    def exception(self) -> Exception | None:
        """Return its failure or its group's error; None if it went well or is pending. No wait.

        The error has no frames: Note [Groups that end].
        """
        failures = map(self._failure, self.handles if self.is_completed() else ())
        failure = next((each for each in failures if each is not None), None)
        verdict = self.group.verdict
        return failure if failure is None or verdict is None else verdict.error()

    def _failure(self, handle: Any) -> Exception | None:  # noqa: ANN401 - of any backend
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


class _InBackend:
    """A context in which a thread is in the backend's code."""

    __slots__ = ("_ends", "_range", "_work")

    def __init__(self, work: Work, *, ends: bool) -> None:
        self._work = work
        self._ends = ends
        self._range: Any = None

    def __enter__(self) -> None:
        work = self._work
        work.waiting_since = time.monotonic()
        if not self._ends:
            work.group.drop_ended()
        work.group.pending.add(work)
        if is_profiling():
            self._range = torch.profiler.record_function(f"{work.label}{' wait' * self._ends}")
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        work = self._work
        explained: Exception | None = None
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, ZeroOptimError):
                is_of_backend = raised_by_backend(error)
                work.group.has_failed |= is_of_backend
                if not work.runs_hook or is_of_backend or work.group.verdict is not None:
                    explained = work.group.log.explain(work, error)
                if explained is not None:
                    raise explained from error
        finally:
            explained = None  # see Note [Groups that end]
            work.waiting_since = None
            # Note [Works that outlive the interpreter]; a device has no thread that takes the GIL.
            if work.late_on is not None or (self._ends if error is None else not work.handles):
                work.group.pending.discard(work)


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
    on all ranks. ``apart``: sends and receives the backend counted, less one for each exchange. ``pending``:
    works of the CPU that are not known to have ended, or that failed. ``outstanding``: the one pending work
    of a device (they end in order).
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
        self._drops_from = _FEW
        self.group = weakref.ref(process_group, lambda _: pending.clear())  # the works keep connections
        self._can_cut = can_cut

    @property
    def whole(self) -> tuple[int, ...]:
        """Global ranks given up with this group: its mesh's, or its own."""
        return self.log.wholes.get(self.ranks, self.ranks)

    def drop_ended(self) -> None:
        """Drop works that have ended, which nobody may ever wait for; looks when their number has doubled."""
        if len(self.pending) < self._drops_from or self.has_failed or self.verdict is not None:
            return
        for work in list(self.pending):
            if work.waiting_since is None and work.handles and work.is_completed():
                self.pending.discard(work)
        self._drops_from = max(_FEW, 2 * len(self.pending))

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

    def wait_for(self, handle: Any) -> bool:  # noqa: ANN401 - a work of gloo, or sends and receives
        """Wait for gloo's collective or sends; StalledError if the group was given up."""
        if wait_and_poll(handle, lambda: self.verdict is not None):
            return True
        group = self.group()
        if group is not None and not isinstance(handle, Paired):
            keep_for_ever(group)
        assert self.verdict is not None  # the group was given up, for good
        raise self.verdict.error()

    def check(self) -> None:
        """Raise StalledError if the group was given up."""
        if self.verdict is not None:
            raise self.verdict.error()


def explained(works: GroupWorks | None, error: RuntimeError) -> Exception | None:
    """Explain a failed future of the backend; None if its own message is best. May take seconds."""
    if works is None:
        return None
    if works.verdict is not None:
        return works.verdict.error()
    return works.log.explain(Work(works, Phase(name="reduce")), error)


def _attempt(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the backend cannot, or has ended
        abort()


def explain_nothing(_work: Work, _error: RuntimeError) -> None:
    """Return None: there is no watchdog."""


@dataclass(slots=True, eq=False)
class WorkLog:
    """The works of this process, as long as the default group lives.

    ``groups``: works by id of the group; other threads add to it. ``verdicts``: by the ranks of a group given
    up. ``wholes``: ranks of a part of a mesh -> all its ranks, which share a verdict. ``explain``: returns
    the exception for a backend's error; None if its own message is best.
    """

    activity: Activity = field(default_factory=Activity)
    groups: dict[int, GroupWorks] = field(default_factory=dict)
    verdicts: dict[tuple[int, ...], Verdict] = field(default_factory=dict)
    wholes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    explain: Callable[[Work, RuntimeError], Exception | None] = explain_nothing

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

    def waits(self) -> list[Work]:
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


def noted_of(group: dist.ProcessGroup) -> GroupWorks | None:
    """Return the works of a group, if recorded."""
    world = dist.group.WORLD
    found = None if world is None else log_of(world).groups.get(id(group))
    return found if found is not None and found.group() is group else None


def log_of(world: dist.ProcessGroup) -> WorkLog:
    """Return the log of this process, by the default group."""
    found = _LOGS.get(world)
    return _LOGS.setdefault(world, WorkLog()) if found is None else found
