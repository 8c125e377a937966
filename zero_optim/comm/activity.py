"""What this process does beside collectives, in marks that other ranks hear of if they miss it."""

import time
from dataclasses import dataclass

from zero_optim.compat.engine import untraced

OVERLAPPED_STEP = "an overlapped step"  # the mark of one bucket's local step, on whichever thread


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that this process began or ended.

    Attributes:
        name: such as ``step()``.
        count: how often it was begun.
        time: when, in seconds of `time.monotonic`.
        is_over: it ended then; otherwise it began.
    """

    name: str
    count: int
    time: float
    is_over: bool


class Activity:
    """What this process does beside works: marks set where calls and passes begin and end.

    Attributes:
        counts: by name, how often it was begun.
        open: by name, what was begun and has not ended; the outermost first.
        last: the last mark, None before any.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.open: dict[str, Mark] = {}
        self.last: Mark | None = None

    @untraced
    def begin(self, name: str) -> None:
        """Note that something begins."""
        count = self.counts[name] = self.counts.get(name, 0) + 1
        self.last = self.open[name] = Mark(name, count, time.monotonic(), is_over=False)

    @untraced
    def end(self, name: str) -> None:
        """Note that it has ended."""
        self.open.pop(name, None)
        self.last = Mark(name, self.counts.get(name, 0), time.monotonic(), is_over=True)


class Doing:
    """A context in which this process does something that has a name.

    A compiled step enters it too, and PyTorch 2.8 cannot trace the clock that is read. So nothing here is
    traced.
    """

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
