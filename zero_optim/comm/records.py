"""Records of works, calls and passes, which `zero_optim.health` tells other ranks."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from zero_optim.comm.backends import raised_by_backend
from zero_optim.compat.engine import is_profiling, untraced
from zero_optim.errors import StalledError, ZeroOptimError

if TYPE_CHECKING:
    from zero_optim.comm.works import GroupWorks

OVERLAPPED_STEP = "an overlapped step"  # the name of one bucket's local step, on whichever thread

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


class Doing:
    """A context that names what this process does; untraced, for compiled steps."""

    __slots__ = ("_activity", "_name")

    def __init__(self, activity: Activity, name: str) -> None:
        self._activity = activity
        self._name = name

    @untraced
    def __enter__(self) -> None:
        self._activity.begin(self._name)

    @untraced
    def __exit__(self, *_: object) -> None:
        self._activity.end(self._name)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group was given up, and the missing group ranks; equal on all its ranks."""

    message: str
    missing: tuple[int, ...] = ()

    def error(self) -> StalledError:
        """Build the exception."""
        return StalledError(self.message, self.missing)


@dataclass(slots=True, eq=False)
class Record:
    """The record of one work; times are seconds of `time.monotonic`.

    ``number``: from 1, in its group here. ``phase``: of `zero_optim.comm.traffic.PHASES`, ``checkpoint`` or
    ``buffers``. ``about``: such as ``bucket 3 (layers.7.weight, …)``, or empty. ``timeout``: seconds.
    ``failure``: the message of its wait's error. ``runs_hook``: a comm hook may raise in it.
    """

    group: "GroupWorks"
    number: int
    phase: str
    about: str
    timeout: float
    started: float
    waiting_since: float | None = None
    ended: float | None = None
    failure: str | None = None
    is_warned: bool = False
    runs_hook: bool = False

    @property
    def text(self) -> str:
        """Return its name in messages."""
        noun = _NOUNS.get(self.phase, f"a collective ({self.phase})")
        return f"{noun} of {self.about}" if self.about else noun

    @property
    def label(self) -> str:
        """Return its name for a profiler."""
        bucket = self.about.partition(" (")[0]
        return f"zero_optim.{self.phase} {bucket}" if bucket else f"zero_optim.{self.phase}"

    def waited(self, now: float) -> float:
        """Return the seconds that a thread has waited."""
        since = self.waiting_since
        return 0.0 if since is None else now - since

    def starting(self) -> "_Watched":
        """Return a context in which the backend starts the work."""
        return _Watched(self, ends=False)

    def waiting(self) -> "_Watched":
        """Return a context in which the caller only waits for the work."""
        return _Watched(self, ends=True)


class _Watched:
    """A context in which a thread is in the backend's code."""

    __slots__ = ("_ends", "_range", "_record")

    def __init__(self, record: Record, *, ends: bool) -> None:
        self._record = record
        self._ends = ends
        self._range: Any = None

    def __enter__(self) -> None:
        record = self._record
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
            explained = None  # see Note [Groups that end] in `works`
            if self._ends:
                record.ended = time.monotonic()
            record.waiting_since = None
            log.waits.pop(id(record), None)
