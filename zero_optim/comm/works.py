"""Works: what this process communicates, waits for and does, so that somebody can say where it stands.

A *work* is a collective of the library, with a label. What is kept of it is a `Record`, which holds no
tensor: the last `KEPT` of them are the *ring* of the process. Nothing here communicates.

Note [Waits that end]
    A thread that waits for a collective is in the backend's C++ code, where nobody can interrupt it. To wait
    in slices would cost time in each wait, and gloo cannot do it for what is sent from rank to rank: there a
    wait that takes too long breaks all connections of the group. But that is just what helps. So a wait is
    the backend's own, without a limit, and is noted here while it lasts. The watchdog looks at the notes.
    When it gives up a group, it breaks the group's connections from its own thread (`GroupWorks.cut`). Every
    wait in that group then raises in its thread, whoever waits there, and what it raises is explained here.

Note [Groups that end]
    gloo closes the connections of a group when nothing refers to the group any more. What a wait raises does:
    its traceback has the frames that waited. It goes when the caller has done with the error, unless one of
    these frames refers to the error in turn. Then it stays until Python collects garbage, long after
    ``destroy_process_group()``, and a rank that waits for this one waits on. So nothing here keeps an error.

    A caller may keep it all the same. So whoever lets go of ranks, after a wait on one of their groups has
    failed, breaks the connections of all of them (`WorkLog.cut_if_failed`).
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
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_optim.comm.activity import Activity
from zero_optim.comm.backends import raised_by_backend
from zero_optim.comm.threads import start_thread
from zero_optim.comm.traffic import Phase
from zero_optim.comm.unended import Paired, keep_for_ever, wait_and_look_up
from zero_optim.compat.engine import aborts_of, is_profiling
from zero_optim.errors import StalledError, ZeroOptimError

if TYPE_CHECKING:
    from zero_optim.comm.started import Awaited, Work

KEPT = 512  # records in the ring
_NO_TAG = 2**31 - 1  # of messages that nobody sends

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group was given up; the same on all its ranks.

    Attributes:
        message: for whoever waits.
        missing: group ranks that did not come.
    """

    message: str
    missing: tuple[int, ...] = ()

    def error(self) -> StalledError:
        """Make what is raised."""
        return StalledError(self.message, self.missing)


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one work; times are seconds of `time.monotonic`.

    Attributes:
        group: the works of its process group.
        number: its place among them, counted from 1 on this process.
        place: likewise among those that all ranks of the group begin; 0 for others.
        phase: one of `zero_optim.comm.traffic.PHASES`, ``checkpoint`` or ``buffers``.
        about: what it brings, such as ``bucket 3 (layers.7.weight, …)``; may be empty.
        timeout: seconds after which a wait for it is given up.
        started: when.
        waiting_since: since when somebody waits for it; None if nobody does.
        ended: when it was known to be over, None if it is not.
        failure: what its wait raised, as text.
        is_warned: somebody was warned of this wait.
        runs_hook: a comm hook runs in it, so what it raises need not come from the backend.
        waiter: the thread that waits for it, and does nothing else; 0 if none does.
        asked: since when, and for how long, it had been waited for when other ranks were last asked whether
            they wait crosswise; None if they never were.
    """

    group: "GroupWorks"
    number: int
    place: int
    phase: str
    about: str
    timeout: float
    started: float
    waiting_since: float | None = None
    ended: float | None = None
    failure: str | None = None
    is_warned: bool = False
    runs_hook: bool = False
    waiter: int = 0
    asked: tuple[float | None, float] | None = None

    @property
    def text(self) -> str:
        """Name the work in a message."""
        noun = _NOUNS.get(self.phase, f"a collective ({self.phase})")
        return f"{noun} of {self.about}" if self.about else noun

    @property
    def label(self) -> str:
        """Name the work for a profiler."""
        bucket = self.about.partition(" (")[0]
        return f"zero_optim.{self.phase} {bucket}" if bucket else f"zero_optim.{self.phase}"

    def waited(self, now: float) -> float:
        """Tell for how many seconds somebody has waited."""
        since = self.waiting_since
        return 0.0 if since is None else now - since

    def starting(self) -> "_Watched":
        """Give a context in which the backend starts the work."""
        return _Watched(self, ends=False)

    def waiting(self) -> "_Watched":
        """Give a context in which the caller waits for the work, and does nothing else."""
        return _Watched(self, ends=True)


class _Watched:
    """A context in which a thread is in the backend's hands. See Note [Waits that end]."""

    __slots__ = ("_ends", "_range", "_record")

    def __init__(self, record: Record, *, ends: bool) -> None:
        self._record = record
        self._ends = ends
        self._range: Any = None

    def __enter__(self) -> None:
        record = self._record
        record.waiter = get_ident() if self._ends else 0
        record.waiting_since = time.monotonic()
        record.group.log.waits[id(record)] = record
        if is_profiling():
            self._range = torch.profiler.record_function(f"{record.label}{' wait' * self._ends}")
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record = self._record
        log = record.group.log
        explained: Exception | None = None
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, ZeroOptimError):
                record.failure = str(error)
                is_of_backend = raised_by_backend(error)
                record.group.has_failed |= is_of_backend
                if not record.runs_hook or is_of_backend or record.group.verdict is not None:
                    explained = log.explain(record, error)
                if explained is not None:
                    raise explained from error
        finally:
            explained = None  # see Note [Groups that end]
            if self._ends:
                record.ended = time.monotonic()
            record.waiting_since = None
            log.waits.pop(id(record), None)


class GroupWorks:
    """The works of one process group on this process. It does not keep the group.

    Args:
        log: of this process.
        process_group: the group.
        ranks: its ranks, as global ranks, in order.
        limit: the timeout of the group itself, None if it has none.
        can_cut: gloo sends its tensors of the CPU, see `cut`.

    Attributes:
        log: as given.
        ranks: as given.
        limit: in seconds.
        verdict: why the group was given up, if it was: no work begins any more.
        has_failed: a wait raised what came from the backend.
        group: a weak reference to it.
        begun: works begun that all ranks of the group begin.
        home: the thread that has begun those; 0 if there are none, -1 if several threads have.
        is_uneven: ranks may count them differently.
        apart: what was begun that concerns some ranks only, less the exchanges made of it: what the backend
            has counted beyond the works that all ranks begin.
        outstanding: a work that an accelerator does while the CPU goes on; at most one is looked at, since
            the works of a group end in order. Once a stream waits for it, its handle is kept no longer: that
            keeps what the work brings.
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
        self.begun = 0
        self.home = 0
        self.is_uneven = False
        self.apart = 0
        self.outstanding: Work | Awaited | None = None
        self.group = weakref.ref(process_group)
        self._numbers = itertools.count(1)
        self._can_cut = can_cut

    @property
    def whole(self) -> tuple[int, ...]:
        """Global ranks that are given up with this group: of the mesh that it is a part of, or its own."""
        return self.log.wholes.get(self.ranks, self.ranks)

    @property
    def name(self) -> str:
        """Name the group, alike on all its ranks; empty if it is gone, or has no name."""
        name = getattr(self.group(), "group_name", "")
        return f"{name} of {self.ranks}" if name else ""

    def cut(self) -> None:
        """Break the connections of the group to other ranks, on any thread: see Note [Waits that end].

        gloo does so where a receive takes too long. So this begins one that nobody answers. One from a rank
        that is known to have ended fails at once, and then the other connections stay. So it asks them all.
        Other backends have a call for it, after which the device goes on, and a CPU that waits for it.
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
        """Wait for a collective or sends of gloo. See Note [Waits that nothing ends] in `unended`.

        Raises:
            RuntimeError: it failed.
            StalledError: the group was given up, and it does not end.
        """
        if wait_and_look_up(handle, lambda: self.verdict is not None):
            return True
        group = self.group()
        if group is not None and not isinstance(handle, Paired):
            keep_for_ever(group)
        assert self.verdict is not None  # the group was given up, for good
        raise self.verdict.error()

    def begin(self, phase: Phase, about: str = "", *, by_all: bool = True) -> Record:
        """Begin a work: give it a number, and room in the ring.

        Args:
            phase: of the work.
            about: what it brings.
            by_all: all ranks of the group begin it, in the same order with others.

        Raises:
            StalledError: the group was given up.
        """
        if self.verdict is not None:
            raise self.verdict.error()
        timeout = self.limit if phase.timeout is None else phase.timeout
        place = 0
        if by_all:
            thread = get_ident()
            if self.home != thread:
                self.home = -1 if self.home else thread
            self.begun = place = self.begun + 1
        record = Record(self, next(self._numbers), place, phase.name, about, timeout, time.monotonic())
        self.log.ring.append(record)
        return record


def explained(works: GroupWorks | None, error: RuntimeError) -> Exception | None:
    """Make what to raise where a future of the backend has failed; None if the error itself says it best.

    May take seconds, and ask all ranks.

    Args:
        works: of the group; None if nobody has noted any.
        error: what the future has raised.
    """
    if works is None:
        return None
    if works.verdict is not None:
        return works.verdict.error()
    return works.log.explain(works.begin(Phase(name="reduce"), by_all=False), error)


def _attempt(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the backend cannot, or has ended
        abort()


def explain_nothing(_record: Record, _error: RuntimeError) -> None:
    """Explain nothing: nobody watches."""


@dataclass(slots=True, eq=False)
class WorkLog:
    """All that is known of the works of this process, as long as the default group lives.

    Attributes:
        ring: the last works, the newest last.
        waits: works that a thread waits for now.
        activity: what the process does beside works.
        groups: the works of each process group, by the id of the group. A plain dict, since the watchdog goes
            through it while other threads add to it. Those of a group that is gone go when one is added.
        verdicts: groups that were given up, by their ranks.
        wholes: by the ranks of a group that is a part of a mesh, all ranks of that. A rank that does not come
            holds up all of them, though each in another group. So they have one verdict.
        explain: makes what a wait raises of what the backend raised; gives None if that says it best. May
            ask other processes.
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
        """Give the works of a group; arguments as of `GroupWorks`."""
        found = self.groups.get(id(process_group))
        if found is None or found.group() is not process_group:
            for key, works in list(self.groups.items()):
                if works.group() is None:
                    self.groups.pop(key, None)
            found = GroupWorks(self, process_group, ranks, limit, can_cut=can_cut)
            self.groups[id(process_group)] = found
        return found

    def give_up(self, ranks: tuple[int, ...], verdict: Verdict) -> Verdict:
        """Let no work begin any more on groups of some ranks.

        Returns:
            The verdict that holds: the first one.
        """
        holds = self.verdicts.setdefault(ranks, verdict)
        for works in list(self.groups.values()):
            if works.whole == ranks:
                works.verdict = holds
        return holds

    def cut_if_failed(self, ranks: tuple[int, ...]) -> None:
        """Break the connections of all groups of some ranks, if a wait on one of them has failed.

        For whoever lets go of them: no other rank is to wait for this one any more. Does not communicate.
        """
        of_ranks = [works for works in list(self.groups.values()) if works.ranks == ranks]
        if any(works.has_failed or works.verdict is not None for works in of_ranks):
            for works in of_ranks:
                works.cut()


# By the default group. PyTorch keeps that in a global, so this has to be one too. It is weak, so that it ends
# with the default group.
_LOGS: WeakKeyDictionary[dist.ProcessGroup, WorkLog] = WeakKeyDictionary()


def noted_of(group: dist.ProcessGroup) -> GroupWorks | None:
    """Give the works of a group, which do not keep it, if any were noted."""
    world = dist.group.WORLD
    found = None if world is None else log_of(world).groups.get(id(group))
    return found if found is not None and found.group() is group else None


def log_of(world: dist.ProcessGroup) -> WorkLog:
    """Give the log of this process.

    Args:
        world: the default group.
    """
    found = _LOGS.get(world)
    if found is None:
        found = _LOGS.setdefault(world, WorkLog())
    return found
