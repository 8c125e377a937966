"""Channels from one rank to another, and the pending calls that use them. No waits but `HostWork.wait`.

Bytes go through a ring in the sender's segment, with two words: how many bytes were written, and how many
were read. Each has one writer, so there is no lock. Messages begin at multiples of `LINE`.
"""

import ctypes
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.host.segment import LINE

if TYPE_CHECKING:
    from zero_optim.host.several_hosts import SeveralHosts
    from zero_optim.host.shared_memory import SharedMemory

PIECE = 2**19  # bytes that are copied at a time; they stay in a processor's cache until they are read


def padded(nbytes: int) -> int:
    """Round up to whole lines."""
    return -(-nbytes // LINE) * LINE


class _End:
    """One end: its words are two of ``words``, a line each, from ``first`` on."""

    def __init__(self, peer: int, words: Any, first: int, ring: Tensor) -> None:  # noqa: ANN401
        self.peer = peer  # the rank at the other end
        self._words, self._written, self._read = words, first * LINE // 8, (first + 1) * LINE // 8
        self._ring = ring
        self._address, self._size = ring.data_ptr(), ring.numel()
        self._at = 0  # bytes that this end has written, or read
        self.queue = deque[Any]()  # the messages that were not written whole, or the steps that are not done


class Message:
    """A head and other parts of a call on their way to one rank; ``ready`` bytes of these parts may go."""

    __slots__ = ("number", "parts", "ready", "sent", "work")

    def __init__(self, work: "HostWork", parts: Sequence[tuple[int, int]]) -> None:
        self.work, self.parts, self.ready = work, parts, sys.maxsize
        self.number = self.sent = 0  # of the part that goes now, and its bytes that have gone
        work.num_pending += 1


class Sender(_End):
    """The writing end."""

    queue: deque[Message]

    def push(self) -> int:
        """Write a piece of the first message; returns its bytes with padding, 0 if there is no room."""
        message, began, num_read = self.queue[0], self._at, int(self._words[self._read])
        while message.number < len(message.parts) and (left := PIECE - (self._at - began)) > 0:
            nbytes, address = message.parts[message.number]
            place = self._at % self._size
            room = min(self._size - (self._at - num_read), self._size - place, left)
            ready = min(nbytes, message.ready) if message.number else nbytes
            count = min(ready - message.sent, room)
            is_whole = message.sent + count == nbytes
            if not is_whole:
                count -= count % LINE
            if count <= 0:
                break
            ctypes.memmove(self._address + place, address + message.sent, count)
            message.sent += count
            self._at += count + -count % LINE
            if is_whole:
                message.number, message.sent = message.number + 1, 0
        self._words[self._written] = self._at
        if message.number == len(message.parts):
            self.queue.popleft()
            message.work.num_pending -= 1
        return self._at - began


class Receiver(_End):
    """The reading end, whose steps take the next messages, in order."""

    queue: "deque[Step]"

    @property
    def address(self) -> int:
        """Where what comes next lies."""
        return self._address + self._at % self._size

    def readable(self) -> int:
        """Return how many bytes can be read at once, whole lines."""
        num_written: int = self._words[self._written]
        return min(num_written - self._at, self._size - self._at % self._size)

    def lacks(self) -> bool:
        """Whether what the steps expect was not written whole."""
        num_written: int = self._words[self._written]
        return sum(step.rest for step in self.queue) > num_written - self._at

    def view(self, dtype: torch.dtype, count: int) -> Tensor:
        """View the next elements."""
        start = self._at % self._size
        return self._ring[start : start + count * dtype.itemsize].view(dtype)

    def drop(self, nbytes: int) -> None:
        """Make room of what was read."""
        self._at += nbytes
        self._words[self._read] = self._at


# What is done with ``count`` bytes, from ``start`` on, that have come from all of a step's ranks.
# Returns False if they are of another call, and stay: Note [Calls that differ].
Act = Callable[[int, int], bool | None]


class HostWork:
    """A pending call, as a handle of the backend. ``kept``: what it sends and fills."""

    def __init__(self, memory: "SharedMemory | SeveralHosts", number: int, *kept: object) -> None:
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
        if self.num_pending:
            self._memory.wait(self, math.inf if timeout is None else timeout.total_seconds())
            if (failure := self.exception()) is not None:
                raise failure
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return not self.num_pending or self._memory.failure is not None

    def exception(self) -> Exception | None:
        """Return its failure."""
        failure = self._memory.failure
        return dist.DistNetworkError(failure) if self.num_pending and failure is not None else None


class Step:
    """What a call does with parts of messages of some ranks, each piece when all of them have sent it."""

    __slots__ = ("_done", "_number", "_parts", "_work", "receivers")

    def __init__(
        self, work: HostWork, receivers: Sequence[Receiver], parts: Sequence[tuple[int, Act]]
    ) -> None:
        self._work, self.receivers, self._parts = work, receivers, parts
        self._number = self._done = 0  # of the part that comes now, and its bytes that have come
        work.num_pending += 1
        for receiver in receivers:
            receiver.queue.append(self)

    @property
    def rest(self) -> int:
        """The bytes, with padding, that are to come of each rank."""
        return sum(padded(nbytes) for nbytes, _ in self._parts[self._number :]) - self._done

    def skip_behind(self, count: int, nbytes: int) -> None:
        """Do nothing with what follows the first parts, in messages of so many bytes with padding."""
        kept = self._parts[:count]
        rest = nbytes - sum(padded(length) for length, _ in kept)
        self._parts = [*kept, (rest, lambda _start, _count: None)] if rest else kept

    def run(self) -> int:
        """Take a piece; returns its bytes with padding, 0 if nothing has come."""
        taken, there = 0, PIECE
        for receiver in self.receivers:
            if receiver.queue[0] is not self:
                return 0
            there = min(there, receiver.readable())
        while taken < there:
            nbytes, act = self._parts[self._number]
            count = min(nbytes - self._done, there - taken)
            if act(self._done, count) is False:
                break
            self._done += count
            if self._done == nbytes:
                self._number, self._done = self._number + 1, 0
            taken += count + -count % LINE
            for receiver in self.receivers:
                receiver.drop(count + -count % LINE)
            if self._number == len(self._parts):
                for receiver in self.receivers:
                    receiver.queue.popleft()
                self._work.num_pending -= 1
                break
        return taken
