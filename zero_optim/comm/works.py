"""The works of each process group on this process, and what becomes of them. Nothing here communicates.

A *work* is a collective of the library, with a label: a `Record`, which holds no tensor. The last `KEPT`
records are the *ring* of the process.

Note [Waits that end]
    A thread that waits is in the backend's C++ code, where nothing can interrupt it. gloo cannot wait in
    slices for sends and receives: a wait that takes too long breaks all connections of the group. But just
    that helps. So waits have no limit, and are noted here. To give up a group, the watchdog breaks its
    connections from another thread (`GroupWorks.cut`). Each wait then raises in its own thread, and
    `WorkLog.explain` says why.

Note [Groups that end]
    gloo closes the connections of a group when nothing refers to it. The traceback of an error does, by the
    frames that waited; if a frame refers to the error in turn, until garbage is collected, and other ranks
    wait on. So nothing here keeps an error. A caller may: so who lets go of ranks after a failed wait cuts
    all their groups (`WorkLog.cut_if_failed`).
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
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_optim.comm.records import Activity, Record, Verdict
from zero_optim.comm.threads import start_thread
from zero_optim.comm.traffic import Phase
from zero_optim.comm.unended import Paired, keep_for_ever, wait_and_look_up
from zero_optim.compat.engine import aborts_of

if TYPE_CHECKING:
    from zero_optim.comm.started import Awaited, Work

KEPT = 512  # records in the ring
_NO_TAG = 2**31 - 1  # of messages that nobody sends


class GroupWorks:
    """The works of one process group on this process, to which it keeps a weak reference.

    Attributes:
        limit: the timeout of the group, in seconds.
        verdict: why the group was given up, if it was: no work begins any more.
        has_failed: a wait raised an error of the backend.
        tags: numbers for messages of an exchange in parts, alike on all ranks.
        apart: sends and receives that the backend has counted, less one for each exchange.
        outstanding: a work that an accelerator does while the CPU goes on. One at a time, as works of a group
            end in order. Once a stream waits for it, its handle is dropped: that keeps the tensors.
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
        self.outstanding: Work | Awaited | None = None
        self.group = weakref.ref(process_group)
        self._numbers = itertools.count(1)
        self._can_cut = can_cut

    @property
    def whole(self) -> tuple[int, ...]:
        """Global ranks that are given up with this group: of the mesh that it is a part of, or its own."""
        return self.log.wholes.get(self.ranks, self.ranks)

    def cut(self) -> None:
        """Break the connections of the group to other ranks, on any thread: see Note [Waits that end].

        gloo does so where a receive takes too long. One from a rank that is known to have ended breaks
        nothing, so each rank is asked. Other backends have a call for it, after which the device and the CPU
        go on.
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
        """Wait for a collective or sends of gloo; StalledError if the group was given up."""
        if wait_and_look_up(handle, lambda: self.verdict is not None):
            return True
        group = self.group()
        if group is not None and not isinstance(handle, Paired):
            keep_for_ever(group)
        assert self.verdict is not None  # the group was given up, for good
        raise self.verdict.error()

    def begin(self, phase: Phase, about: str = "") -> Record:
        """Begin a work; raises StalledError if the group was given up."""
        if self.verdict is not None:
            raise self.verdict.error()
        timeout = self.limit if phase.timeout is None else phase.timeout
        record = Record(self, next(self._numbers), phase.name, about, timeout, time.monotonic())
        self.log.ring.append(record)
        return record


def explained(works: GroupWorks | None, error: RuntimeError) -> Exception | None:
    """Explain a failed future of the backend; None if it says it best itself. May take seconds."""
    if works is None:
        return None
    if works.verdict is not None:
        return works.verdict.error()
    return works.log.explain(works.begin(Phase(name="reduce")), error)


def _attempt(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the backend cannot, or has ended
        abort()


def explain_nothing(_record: Record, _error: RuntimeError) -> None:
    """Explain nothing: there is no watchdog."""


@dataclass(slots=True, eq=False)
class WorkLog:
    """The works of this process, as long as the default group lives.

    Attributes:
        ring: the last works, the newest last.
        waits: works that a thread waits for now.
        groups: the works of each process group, by its id. The watchdog reads it while other threads add to
            it.
        verdicts: groups that were given up, by their ranks.
        wholes: by the ranks of a part of a mesh, all ranks of the mesh: they have one verdict.
        explain: turns an error of the backend into the exception of the wait; None if it says it best.
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
        """Let no work begin any more on groups of some ranks; returns the first verdict, which holds."""
        holds = self.verdicts.setdefault(ranks, verdict)
        for works in list(self.groups.values()):
            if works.whole == ranks:
                works.verdict = holds
        return holds

    def cut_if_failed(self, ranks: tuple[int, ...]) -> None:
        """Cut all groups of some ranks if a wait on one has failed: called by who lets go of the ranks."""
        of_ranks = [works for works in list(self.groups.values()) if works.ranks == ranks]
        if any(works.has_failed or works.verdict is not None for works in of_ranks):
            for works in of_ranks:
                works.cut()


# By the default group. PyTorch keeps that in a global, so this has to be one too. Weak, so that it ends with
# it.
_LOGS: WeakKeyDictionary[dist.ProcessGroup, WorkLog] = WeakKeyDictionary()


def noted_of(group: dist.ProcessGroup) -> GroupWorks | None:
    """Return the works of a group, if any were noted."""
    world = dist.group.WORLD
    found = None if world is None else log_of(world).groups.get(id(group))
    return found if found is not None and found.group() is group else None


def log_of(world: dist.ProcessGroup) -> WorkLog:
    """Return the log of this process, which belongs to the default group."""
    found = _LOGS.get(world)
    return _LOGS.setdefault(world, WorkLog()) if found is None else found
