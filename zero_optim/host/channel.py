"""Channels from one rank to another, and the pending calls that use them. No waits but `HostWork.wait`.

Bytes go through a ring in the sender's segment, with two words: how many bytes were written, and how many
were read. Each has one writer, so there is no lock. Messages begin at multiples of `LINE`.

Note [Calls that differ]
    Each message begins with a line that tells its call. If that is not the expected one, it is not read: the
    ranks wait, and the watchdog tells what each does. Of messages with other tags only the heads are taken.
"""

import ctypes
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.compat.autograd import is_profiling
from zero_optim.host.segment import LINE

if TYPE_CHECKING:
    from zero_optim.host.several_hosts import SeveralHosts
    from zero_optim.host.shared_memory import SharedMemory

PIECE = 2**19  # bytes that are copied at a time; they stay in a processor's cache until they are read
ROWS, ADDENDS, SUMS = range(1, 4)  # kinds of messages
_RANGES = {ROWS: "memory:rows", ADDENDS: "memory:sum", SUMS: "memory:sum"}  # in a profile
_HEAD = ctypes.c_uint64 * (LINE // 8)  # number of the call, kind, bytes, tag, bytes in the ring
_LENGTH, _UNSEEN = itemgetter(0), nullcontext()

Then: TypeAlias = Callable[[str | None], None] | None
# What is done with ``count`` bytes, from ``start`` on, that have come from all ranks of a message.
Act: TypeAlias = Callable[[int, int], None]
Part: TypeAlias = tuple[int, int | Act]  # its length, and its address or what is done with it


def padded(nbytes: int) -> int:
    """Round up to whole lines."""
    return -(-nbytes // LINE) * LINE


class End:
    """One end: its words are two of ``words``, a line each, from ``first`` on."""

    def __init__(self, peer: int, words: Any, first: int, ring: Tensor) -> None:  # noqa: ANN401
        self.peer = peer  # the rank at the other end
        self.words, self.written, self.read = words, first * LINE // 8, (first + 1) * LINE // 8
        self.ring, self.address, self.size = ring, ring.data_ptr(), ring.numel()
        self.at = 0  # bytes that this end has written, or read
        self.queue = deque[Message]()  # which have not ended

    def lacks(self) -> bool:
        """Whether what is expected here was not written whole."""
        num_written: int = self.words[self.written]
        return sum(message.rest for message in self.queue) > num_written - self.at

    def view(self, dtype: torch.dtype, count: int) -> Tensor:
        """View the next elements that are read."""
        start = self.at % self.size
        return self.ring[start : start + count * dtype.itemsize].view(dtype)


class HostWork:
    """A pending call, as a handle of the backend. ``kept``: what it sends and fills."""

    def __init__(
        self, memory: "SharedMemory | SeveralHosts", num_pending: int, kept: object = None, then: Then = None
    ) -> None:
        self._memory, self.num_pending = memory, num_pending  # messages that have not ended
        self._kept, self.then = kept, then  # which is called once, with its failure, if any
        self.began = time.monotonic()
        self.nbytes = 0  # that it sends

    def end(self, failure: str | None = None) -> None:
        """Let go of what it has kept, and tell."""
        then, self._kept, self.then = self.then, None, None
        if then is not None:
            then(failure)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended, or so long; RuntimeError if it does not, or failed."""
        if self.num_pending:
            self._memory.wait(self, math.inf if timeout is None else timeout.total_seconds())
            if (failure := self.exception()) is not None:
                raise failure
        self._kept = None  # the thread that moved the last byte may not have come to `end`
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return not self.num_pending or self._memory.failure is not None

    def exception(self) -> Exception | None:
        """Return its failure."""
        failure = self._memory.failure
        return dist.DistNetworkError(failure) if self.num_pending and failure is not None else None


class Message:
    """A head and parts of a call, which go through the first of ``ends``, or come through all of them."""

    __slots__ = ("_done", "_num_heads", "_number", "_parts", "ends", "head", "ready", "work")

    def __init__(
        self,
        ends: Sequence[End],
        kind: int,
        parts: Iterable[Part],
        tag: int = 0,
        num_heads: int = 0,  # the first parts, which are taken whatever the tag
        ready: int = sys.maxsize,  # bytes of the parts that may go
    ) -> None:
        self.ends, self.ready, self._num_heads = ends, ready, num_heads
        self.work: HostWork  # since it has begun
        self._number = self._done = 0  # of the part that moves now, and its bytes that have moved
        parts, total, in_ring = list(filter(_LENGTH, parts)), 0, 0
        for nbytes, _ in parts:
            total += nbytes
            in_ring += nbytes + -nbytes % LINE
        self.head = _HEAD(0, kind, total, tag, in_ring)
        self._parts: list[tuple[int, Any]] = [(LINE, ctypes.addressof(self.head)), *parts]

    @property
    def rest(self) -> int:
        """The bytes, with padding, that have not moved."""
        return sum(padded(nbytes) for nbytes, _ in self._parts[self._number :]) - self._done

    def move(self) -> int:
        """Move a piece of the first message of an end; returns its bytes with padding, 0 if none can."""
        raise NotImplementedError


class Outgoing(Message):
    """A message that this rank sends."""

    __slots__ = ()

    def move(self) -> int:
        """Write a piece; 0 if there is no room."""
        end = self.ends[0]
        began, num_read = end.at, int(end.words[end.read])
        while self._number < len(self._parts) and (left := PIECE - (end.at - began)) > 0:
            nbytes, address = self._parts[self._number]
            place = end.at % end.size
            room = min(end.size - (end.at - num_read), end.size - place, left)
            ready = min(nbytes, self.ready) if self._number else nbytes
            count = min(ready - self._done, room)
            is_whole = self._done + count == nbytes
            if not is_whole:
                count -= count % LINE
            if count <= 0:
                break
            ctypes.memmove(end.address + place, address + self._done, count)
            self._done += count
            end.at += count + -count % LINE
            if is_whole:
                self._number, self._done = self._number + 1, 0
        end.words[end.written] = end.at
        if self._number == len(self._parts):
            end.queue.popleft()
            self.work.num_pending -= 1
        return end.at - began


class Incoming(Message):
    """A message that some ranks send; each piece is taken when all of them have sent it."""

    __slots__ = ()

    def move(self) -> int:
        """Take a piece; 0 if nothing has come."""
        taken, there, first, kind = 0, PIECE, self.ends[0], self.head[1]
        for end in self.ends:
            if end.queue[0] is not self:
                return 0
            there = min(there, end.words[end.written] - end.at, end.size - end.at % end.size)
        while taken < there and self._number < len(self._parts):
            nbytes, place = self._parts[self._number]
            count = min(nbytes - self._done, there - taken)
            if not self._number:
                if not self._accept_head():
                    break
            else:
                with torch.profiler.record_function(_RANGES[kind]) if is_profiling() else _UNSEEN:
                    if isinstance(place, int):
                        ctypes.memmove(place + self._done, first.address + first.at % first.size, count)
                    else:
                        place(self._done, count)
            self._done += count
            if self._done == nbytes:
                self._number, self._done = self._number + 1, 0
            taken += count + -count % LINE
            for end in self.ends:
                end.at += count + -count % LINE
        is_over = self._number == len(self._parts)
        for end in self.ends:
            end.words[end.read] = end.at  # makes room of what was read
            if is_over:
                end.queue.popleft()
        self.work.num_pending -= is_over
        return taken

    def _accept_head(self) -> bool:
        """Return whether this message comes, perhaps with another tag; else it stays."""
        heads = [ctypes.string_at(end.address + end.at % end.size, LINE) for end in self.ends]
        if heads.count(bytes(self.head)) == len(heads):
            return True
        came = _HEAD.from_buffer_copy(heads[0])
        if not self.head[3] or came[:2] != self.head[:2]:
            return False
        kept = self._parts[: 1 + self._num_heads]
        rest = LINE + came[4] - sum(padded(nbytes) for nbytes, _ in kept)
        self._parts = [*kept, (rest, lambda *_: None)] if rest else kept
        return True
