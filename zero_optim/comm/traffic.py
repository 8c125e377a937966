"""What a rank sends, and how long its callers are held up by communication: counters, by phase.

Note [Bytes sent]
    Counted is what this rank's network interface sends of the tensors, without headers. For gloo it is exact:

    - A broadcast goes along a tree: the rank ``v`` places behind the source sends it once for each power of
      two above ``v``, if there is a rank that many places further.
    - An exchange sends each other rank its piece. Rows of units are sent likewise, by their owners.
    - A gather of small tensors goes round a ring: W-1 times the tensor.
    - A sum of n bytes goes round a ring twice: ``2 * (W-1) / W * n``; indices and values of a sparse tensor
      once.

Note [Exposed seconds]
    Time is exposed if a caller is held up: by a wait, and on the CPU also by what the calling thread does for
    communication (pack, start, add up, hand out). Not by a thread of this library, but by the wait for it. On
    an accelerator waits of the CPU alone are counted; with NCCL a stream waits instead. Spans lie in each
    other, and a second counts once, in the innermost.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

# Of an optimizer, see `ZeroRedundancyOptimizer.metrics`. What is given no other name is counted as "agree".
PHASES = ("gather", "reduce", "clip", "agree", "state", "mirror")


class Waitable(Protocol):
    """The handle of a collective that was started."""

    def wait(self) -> object:
        """Wait for it: the caller, or the current stream."""
        ...


@dataclass(slots=True)
class _Counts:
    seconds: float = 0.0  # exposed
    nbytes: int = 0  # sent
    collectives: int = 0  # started


class Traffic:
    """Counts of one optimizer, or one reducer. Several threads may add to it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._counts: dict[str, _Counts] = {}
        self._steps = 0
        self._lock = threading.Lock()

    def count_step(self) -> None:
        """Count a step, or a backward pass of a reducer."""
        with self._lock:
            self._steps += 1

    def add(self, phase: str, *, seconds: float = 0.0, nbytes: int = 0, collectives: int = 0) -> None:
        """Add to the counts of a phase."""
        with self._lock:
            counts = self._counts.get(phase)
            if counts is None:
                counts = self._counts[phase] = _Counts()
            counts.seconds += seconds
            counts.nbytes += nbytes
            counts.collectives += collectives

    def figures(self, phases: tuple[str, ...], steps: str, *, reset: bool) -> dict[str, float]:
        """Return the counts of some phases, and the totals; with ``reset`` count from zero again."""
        with self._lock:
            counts, num_steps = self._counts, self._steps
            told = _told(counts, phases)
            if reset:
                self._counts, self._steps = {}, 0
        told[steps] = float(num_steps)
        return told


def _told(counts: Mapping[str, _Counts], phases: tuple[str, ...]) -> dict[str, float]:
    named = {phase: counts.get(phase, _Counts()) for phase in phases}
    every = list(counts.values())
    named["total"] = _Counts(
        sum((each.seconds for each in every), 0.0),
        sum(each.nbytes for each in every),
        sum(each.collectives for each in every),
    )
    told = {f"exposed_seconds/{phase}": each.seconds for phase, each in named.items()}
    told |= {f"sent_bytes/{phase}": float(each.nbytes) for phase, each in named.items()}
    return told | {f"collectives/{phase}": float(each.collectives) for phase, each in named.items()}


@dataclass(frozen=True, slots=True)
class Phase:
    """Where traffic and waits count: in a phase of `PHASES`, with the timeout of a wait in seconds."""

    traffic: Traffic = field(default_factory=Traffic)
    name: str = "agree"
    is_exposed: bool = True
    timeout: float | None = None

    def sent(self, nbytes: int, collectives: int = 1) -> None:
        """Count what is sent."""
        self.traffic.add(self.name, nbytes=nbytes, collectives=collectives)

    def held_up(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits, or works for communication alone."""
        return _Span(self.traffic, self.name) if self.is_exposed else nullcontext()


class _OpenSpans(threading.local):
    """The spans that a thread is in, two numbers each: seconds of spans inside of it, and its begin."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


_OPEN = _OpenSpans()


class _Span:
    """Counts the time that a body takes, but for what spans inside of it count."""

    __slots__ = ("_name", "_traffic")

    def __init__(self, traffic: Traffic, name: str) -> None:
        self._traffic = traffic
        self._name = name

    def __enter__(self) -> None:
        spans = _OPEN.seconds
        spans.append(0.0)
        spans.append(self._traffic.clock())

    def __exit__(self, *_: object) -> None:
        spans = _OPEN.seconds
        seconds = self._traffic.clock() - spans.pop()
        inner = spans.pop()
        if spans:
            spans[-2] += seconds
        self._traffic.add(self._name, seconds=seconds - inner)


def broadcast_nbytes(nbytes: int, behind: int, size: int, *, is_gloo: bool) -> int:
    """Count what a rank sends in a broadcast, ``behind`` places after the source: Note [Bytes sent]."""
    if not is_gloo:
        return nbytes if behind < size - 1 else 0
    reach, times = 1, 0
    while reach < size:
        times += behind < reach and behind + reach < size
        reach *= 2
    return times * nbytes


def sum_nbytes(nbytes: int, size: int) -> int:
    """Count what one rank sends where a tensor is summed over all ranks."""
    return 2 * (size - 1) * nbytes // size
