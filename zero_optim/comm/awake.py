"""How long a wait has lasted, without the time in which this process did not run.

Note [Time asleep]
    A process may stand still for hours and then go on: the whole job was stopped (SIGSTOP, a frozen
    container, a paused virtual machine), or a laptop slept, where the clock runs on meanwhile. All waits look
    very long then, though nobody is missing: the other ranks stood still as well, or are about to come. The
    thread that looks at the waits sleeps a known time between two looks. If it comes much later than it
    should, it did not run in between, and that time does not count. What a busy machine adds is less than
    `PUNCTUAL`, and counts. A rank that alone is stopped is missed by the others all the same, as they run.
"""

import time
from collections import deque
from collections.abc import Callable

PUNCTUAL = 1.0  # seconds by which a look may be late and still counts in full
_KEPT = 256  # times asleep, of more than `PUNCTUAL` each


class AwakeTime:
    """A clock that leaves out the time in which this process did not run; for one thread.

    Args:
        clock: in seconds; runs on while the process stands still.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._asleep: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # from when to when

    def look(self, planned: float) -> float:
        """Note that the thread runs; gives what the clock says.

        Args:
            planned: seconds after which it wanted to look again, or before.
        """
        now = self._clock()
        if self._last is not None and now - self._last > planned + PUNCTUAL:
            self._asleep.append((self._last + planned, now))
        self._last = now
        return now

    def since(self, start: float, now: float) -> float:
        """Tell how many seconds lie between two times of the clock, without those asleep."""
        lost = sum(max(0.0, end - max(begin, start)) for begin, end in self._asleep)
        return max(0.0, now - start - lost)
