"""What a rank sends, and how long its callers wait for communication: counters, by phase.

Note [Bytes sent]
    What is counted is what this rank's network interface sends of the tensors, without the headers of
    protocols. For gloo it is exact:

    - A broadcast goes along a tree. The source sends its row ``ceil(log2(W))`` times, and some of the others
      pass it on. The rank ``v`` places behind the source sends it once for each power of two above ``v``, if
      there is a rank that many places further. All ranks together send it W-1 times.
    - An exchange sends each other rank its piece.
    - A gather of small tensors goes round a ring: W-1 times the tensor.
    - A sum of n bytes goes round a ring twice: ``2 * (W-1) / W * n``, but for the rounding of its parts. Of a
      sparse tensor the indices and values go round once.

    For other backends a broadcast is taken to go round a ring too, where every rank but the last passes a row
    on. What they really do is theirs to choose.

Note [Exposed seconds]
    A wait is exposed if a caller waits: training stands still meanwhile. What a thread of this library waits
    for during the backward pass is not exposed, but the wait for that thread is. Only waits of the CPU are
    counted. With NCCL the CPU does not wait, a stream does. How long that was takes events to see, or a
    profiler. The clock is read around waits alone, so the figures cost next to nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    """Counts of one optimizer, or one reducer. Several threads may add to it.

    Args:
        clock: gives seconds, from any start.

    Attributes:
        clock: as given.
    """

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
            counts = self._counts.setdefault(phase, _Counts())
            counts.seconds += seconds
            counts.nbytes += nbytes
            counts.collectives += collectives

    def figures(self, phases: tuple[str, ...], steps: str, *, reset: bool) -> dict[str, float]:
        """Give the counts, and their totals.

        Args:
            phases: that are in the result, whether or not anything was counted.
            steps: the key under which steps are given.
            reset: count from zero again.
        """
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
    """Where something is counted.

    Attributes:
        traffic: whose counts.
        name: one of `PHASES`.
        is_exposed: callers wait here, see Note [Exposed seconds].
        timeout: seconds after which a wait is given up; None for the process group's own timeout.
    """

    traffic: Traffic = field(default_factory=Traffic)
    name: str = "agree"
    is_exposed: bool = True
    timeout: float | None = None

    def sent(self, nbytes: int, collectives: int = 1) -> None:
        """Count what is sent."""
        self.traffic.add(self.name, nbytes=nbytes, collectives=collectives)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the body takes; it waits and does nothing else."""
        if not self.is_exposed:
            yield
            return
        start = self.traffic.clock()
        try:
            yield
        finally:
            self.traffic.add(self.name, seconds=self.traffic.clock() - start)


def broadcast_nbytes(nbytes: int, behind: int, size: int, *, is_gloo: bool) -> int:
    """Count what one rank sends in a broadcast; see Note [Bytes sent].

    Args:
        nbytes: of the tensor.
        behind: how many places the rank comes after the source, 0 for the source itself.
        size: number of ranks.
        is_gloo: whether it goes along gloo's tree; otherwise along a ring.
    """
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
