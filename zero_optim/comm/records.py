"""Records of calls, passes and verdicts, which `zero_optim.health` tells other ranks."""

import time
from dataclasses import dataclass

from zero_optim.compat.autograd import untraced
from zero_optim.errors import StalledError

OVERLAPPED_STEP = "an overlapped step"  # the name of one bucket's local step, on whichever thread


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
