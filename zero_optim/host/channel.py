"""Channels: bytes from one rank to another, through a ring in the sender's segment. No waits.

A ring has two words: how many bytes were written, and how many were read. Each has one writer, so there is no
lock. Messages begin at multiples of `LINE`.
"""

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_optim.host.segment import LINE

if TYPE_CHECKING:
    from zero_optim.host.pending_calls import HostWork, Step

PIECE = 2**19  # bytes that are copied at a time; they stay in a processor's cache until they are read


def padded(nbytes: int) -> int:
    """Round up to whole lines."""
    return -(-nbytes // LINE) * LINE


class _End:
    """One end: ``written`` and ``read`` are numbers of ``words``, a line each."""

    def __init__(self, peer: int, words: Any, written: int, read: int, ring: Tensor) -> None:  # noqa: ANN401
        self.peer = peer  # the rank at the other end
        self._words, self._written, self._read = words, written * LINE // 8, read * LINE // 8
        self._ring = ring
        self._address, self._size = ring.data_ptr(), ring.numel()
        self._at = 0  # bytes that this end has written, or read


class Message:
    """Bytes on their way to one rank; ``ready`` of them may go."""

    __slots__ = ("address", "nbytes", "ready", "sent")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes, self.ready, self.sent = address, nbytes, nbytes, 0


class Sender(_End):
    """The writing end; ``queue`` has the messages that were not written whole, with whom to tell."""

    def __init__(self, peer: int, words: Any, written: int, read: int, ring: Tensor) -> None:  # noqa: ANN401
        super().__init__(peer, words, written, read, ring)
        self.queue: deque[tuple[Message, HostWork]] = deque()

    def push(self) -> int:
        """Write a piece of the first message; returns its bytes, 0 if there is nothing, or no room."""
        if not self.queue:
            return 0
        message, work = self.queue[0]
        place = self._at % self._size
        num_read: int = self._words[self._read]
        room = min(self._size - (self._at - num_read), self._size - place, PIECE)
        count = min(message.ready - message.sent, room)
        is_whole = message.sent + count == message.nbytes
        if not is_whole:
            count -= count % LINE
        if count <= 0:
            return 0
        ctypes.memmove(self._address + place, message.address + message.sent, count)
        message.sent += count
        self._at += padded(count)
        self._words[self._written] = self._at
        if is_whole:
            self.queue.popleft()
            work.num_pending -= 1
        return count


class Receiver(_End):
    """The reading end; ``steps`` are what is done with the next messages, in their order."""

    def __init__(self, peer: int, words: Any, written: int, read: int, ring: Tensor) -> None:  # noqa: ANN401
        super().__init__(peer, words, written, read, ring)
        self.steps: deque[Step] = deque()
        self._typed: dict[torch.dtype, Tensor] = {}

    def readable(self) -> int:
        """Return how many bytes can be read at once, whole lines."""
        num_written: int = self._words[self._written]
        return min(num_written - self._at, self._size - self._at % self._size)

    def lacks(self) -> bool:
        """Whether what the steps expect was not written whole."""
        num_written: int = self._words[self._written]
        return sum(padded(step.rest) for step in self.steps) > num_written - self._at

    @property
    def address(self) -> int:
        """Return where they lie."""
        return self._address + self._at % self._size

    def view(self, dtype: torch.dtype, count: int) -> Tensor:
        """View the next elements."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._ring.view(dtype)
        start = self._at % self._size // dtype.itemsize
        return typed[start : start + count]

    def drop(self, nbytes: int) -> None:
        """Make room of what was read."""
        self._at += nbytes
        self._words[self._read] = self._at
