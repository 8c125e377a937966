"""Pending calls, and the steps that take their bytes. No waits but `HostWork.wait`."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from zero_optim.host.channel import PIECE, Receiver, padded

if TYPE_CHECKING:
    from zero_optim.host.shared_memory import SharedMemory

# What is done with ``count`` bytes, from ``start`` on, that have come from all of a step's ranks.
# Returns False if they are of another call, and stay: Note [Calls that differ].
Act = Callable[[int, int], bool | None]


class HostWork:
    """A pending call, as a handle of the backend. ``kept``: what it sends and fills."""

    def __init__(self, memory: "SharedMemory", number: int, *kept: object) -> None:
        self._memory = memory
        self.number = number
        self.began = time.monotonic()
        self.num_pending = 0  # messages to be sent, and steps to be done
        self.nbytes = 0  # that it sends
        self.kept = list(kept)
        self.then: Callable[[str | None], None] | None = None  # called once with its failure, if any

    def end(self, failure: str | None = None) -> None:
        """Let go of what it has kept, and tell."""
        self.kept.clear()
        then, self.then = self.then, None
        if then is not None:
            then(failure)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended, or so long; RuntimeError if it does not, or failed."""
        self._memory.wait(self, None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return not self.num_pending or self._memory.failure is not None

    def exception(self) -> Exception | None:
        """Return its failure."""
        failure = self._memory.failure
        return dist.DistNetworkError(failure) if self.num_pending and failure is not None else None


class Step:
    """What a call does with the next ``nbytes`` of some ranks, each piece when all of them have sent it."""

    __slots__ = ("_act", "_done", "_nbytes", "_work", "receivers")

    def __init__(
        self, work: HostWork, receivers: Sequence[Receiver], nbytes: int, act: Act, *, is_next: bool = False
    ) -> None:
        self._work, self.receivers, self._nbytes, self._act, self._done = work, receivers, nbytes, act, 0
        work.num_pending += 1
        for receiver in receivers:
            receiver.steps.insert(1 if is_next else len(receiver.steps), self)

    @property
    def rest(self) -> int:
        """Bytes that are to come, of each rank."""
        return self._nbytes - self._done

    def drop(self) -> None:
        """Do nothing of it."""
        self._work.num_pending -= 1
        for receiver in self.receivers:
            receiver.steps.remove(self)

    def run(self) -> int:
        """Take a piece; returns its bytes, 0 if it has not come."""
        there = PIECE
        for receiver in self.receivers:
            if receiver.steps[0] is not self:
                return 0
            there = min(there, receiver.readable())
        count = min(self.rest, there)
        if not count or self._act(self._done, count) is False:
            return 0
        self._done += count
        is_over = not self.rest
        for receiver in self.receivers:
            receiver.drop(padded(count))
            if is_over:
                receiver.steps.popleft()
        self._work.num_pending -= is_over
        return count
