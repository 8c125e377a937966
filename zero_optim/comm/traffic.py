"""Counters by phase: bytes that a rank sends, and seconds that its callers wait for communication.

Note [Bytes sent]
    What this rank's network interface sends of the tensors, without headers. Exact for gloo:

    - A broadcast goes along a tree: the rank ``v`` places behind the source sends once for each power of two
      above ``v``, if a rank is that many places further.
    - An exchange, or rows of a unit, send one piece to each other rank.
    - A gather of small tensors goes round a ring: W-1 times the tensor.
    - A sum of n bytes goes round twice: ``2 * (W-1) / W * n``; a sparse tensor's indices and values once.

    Through memory what a rank copies into its rings; over several hosts also what it sends across.

Note [Exposed seconds]
    Time is exposed while a caller waits, or its CPU packs, starts or adds. The library's threads are not
    exposed, but waits for them are. With NCCL a stream waits, not the CPU. Spans nest, and a second counts
    once, in the innermost.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from zero_optim.compat import private

# Of an optimizer, see `ZeroRedundancyOptimizer.metrics`. What is given no other name is counted as "agree".
PHASES = ("gather", "reduce", "clip", "agree", "state")
# Seconds of the longest wait, or of that and of a wait of all ranks for each other; None for the group's.
Timeout = float | tuple[float | None, float] | None
LONG = 60.0  # seconds of a wait after which a user has begun to wonder; the usual timeout is 30 minutes


_UNITS = ("exposed_seconds", "sent_bytes", "collectives")  # of a phase; collectives are those started


class Traffic:
    """Counts of one optimizer or reducer. Thread-safe."""

    def __init__(self) -> None:
        self.counts = defaultdict[str, dict[str, float]](lambda: dict.fromkeys(_UNITS, 0.0))
        self._steps = 0
        self.lock = threading.RLock()  # a signal handler may communicate too

    def count_step(self) -> None:
        """Count a step, or a backward pass of a reducer."""
        with self.lock:
            self._steps += 1

    def figures(self, phases: tuple[str, ...], steps: str, *, reset: bool) -> dict[str, float]:
        """Return the counts of some phases and the totals; ``reset`` counts from zero again."""
        with self.lock:
            total = {unit: sum((each[unit] for each in self.counts.values()), 0.0) for unit in _UNITS}
            named = {**{phase: self.counts[phase] for phase in phases}, "total": total}
            figures = {f"{unit}/{phase}": each[unit] for unit in _UNITS for phase, each in named.items()}
            figures[steps] = float(self._steps)
            if reset:
                self.counts.clear()
                self._steps = 0
        return figures


# The open ``spans`` of a thread: of each the seconds of inner spans, and its begin. A signal handler, which
# may open more, runs between any two lines.
_OPEN = threading.local()


@dataclass(frozen=True, slots=True)
class Phase:
    """The phase, one of `PHASES`, of traffic and waits; as a context it counts exposed seconds."""

    traffic: Traffic = field(default_factory=Traffic)
    name: str = "agree"
    is_exposed: bool = True
    timeout: Timeout = None

    def limits(self, of_group: float) -> tuple[float, float]:
        """Return the seconds of the longest wait, and of a wait of all ranks for each other."""
        timeout = self.timeout
        longest, apart = timeout if isinstance(timeout, tuple) else (timeout, timeout or LONG)
        return of_group if longest is None else longest, apart

    def sent(self, nbytes: int, collectives: int = 1) -> None:
        """Count what is sent."""
        with self.traffic.lock:
            counts = self.traffic.counts[self.name]
            counts["sent_bytes"] += nbytes
            counts["collectives"] += collectives

    def __enter__(self) -> None:
        if self.is_exposed:
            vars(_OPEN).setdefault("spans", []).append([0.0, time.perf_counter()])

    def __exit__(self, *_: object) -> None:
        if not self.is_exposed:
            return
        spans = _OPEN.spans
        inner, began = spans.pop()
        seconds = time.perf_counter() - began
        if spans:
            spans[-1][0] += seconds
        with self.traffic.lock:
            self.traffic.counts[self.name]["exposed_seconds"] += seconds - inner


def broadcast_nbytes(nbytes: int, behind: int, size: int, *, is_tree: bool) -> int:
    """Return the bytes a rank sends in a broadcast, ``behind`` places after the source."""
    if not is_tree:
        return nbytes if behind < size - 1 else 0
    reach, times = 1, 0
    while reach < size:
        times += behind < reach and behind + reach < size
        reach *= 2
    return times * nbytes


def sum_nbytes(tensor: Tensor, size: int) -> int:
    """Return the bytes one rank sends for a sum of a tensor over all ranks."""
    if tensor.is_sparse:
        nbytes: int = private.indices(tensor).nbytes + private.values(tensor).nbytes
        return (size - 1) * nbytes
    return 2 * (size - 1) * tensor.nbytes // size
