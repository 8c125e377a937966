"""The memory that the ranks of a group share, and the calls that go through it.

Every rank starts the same calls in one order. A call copies what it sends into the rings of its receivers as
far as there is room; sums are added up straight from the rings. `messages` has what is sent in them.

Note [Who moves the bytes]
    A thread that waits for a call moves the bytes of all calls. While nobody waits, and calls are pending, a
    thread of this memory does it, so a rank that does something else holds nobody up. Whoever finds nothing
    to move sleeps until a word of its segment, the bell, changes; the others change it after each piece.
    While the main thread is at it, signal handlers wait: Note [Handlers and locks].
"""

import atexit
import itertools
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from zero_optim.compat.signals import HandlersLater
from zero_optim.compat.threads import start_thread
from zero_optim.errors import message_of
from zero_optim.host.channel import PIECE, End, HostWork, Message, Outgoing, Then
from zero_optim.host.segment import GIVEN_UP, LEFT, LINE, Segment

_LOOK = 0.1  # seconds until a waiting thread looks whether the others are alive
_LONGEST = 1.0  # seconds for which signal handlers wait
_GRACE = 0.005  # seconds between two looks of the thread, for a caller to wait for what it has started
_IDLE = 0.2  # seconds without calls until the thread ends

GAVE_UP = "of the group has given up"  # it knows why, and tells


class SharedMemory:
    """The calls of this rank; see above. ``segments`` by rank, ``pids`` likewise; ``limit`` in seconds."""

    def __init__(self, rank: int, segments: Sequence[Segment], pids: Sequence[int], limit: float) -> None:
        self.rank, self.size, self.num_started = rank, len(segments), 0
        self.failure: str | None = None  # why no call ends well any more
        self._segments, self._limit = segments, limit
        peers = [peer for peer in range(self.size) if peer != rank]
        self.sending = {peer: _end(peer, segments, rank, peer) for peer in peers}
        self.receiving = {peer: _end(peer, segments, peer, rank) for peer in peers}
        self._process = os.getpid()
        # Descriptors of processes, whose numbers others may get later.
        self._processes = {os.pidfd_open(pids[peer]): peer for peer in self.sending}
        for fd in self._processes:
            weakref.finalize(self, os.close, fd).atexit = False
        self._works: list[HostWork] = []  # pending, in their order
        self._lock = threading.Lock()
        self._waiting = list[HostWork]()  # what threads wait for; a list, as threads change it at once
        self._is_served = False  # by a thread: Note [Who moves the bytes]
        self._looked = time.monotonic()
        _ALL.add(self)

    # ------------------------------------------------------------------ calls begin

    def start(self, messages: Sequence[Message], kept: object, then: Then = None) -> HostWork:
        """Start a call of some messages, whose tensors it keeps. Sends what there is room for."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a process that was forked from a rank cannot take part in its collectives: start ranks with "
                "torchrun, or make a process group there"
            )
        with HandlersLater():
            with self._lock:
                if self.failure is not None:
                    raise dist.DistNetworkError(self.failure)
                self.num_started += 1
                work = HostWork(self, len(messages), kept, then)
                for message in messages:
                    message.work, message.head[0] = work, self.num_started
                    work.nbytes += message.head[2] if isinstance(message, Outgoing) else 0
                    for end in message.ends:
                        end.queue.append(message)
                self._works.append(work)
                ended = self._move()
            for each in ended or ():  # without the lock: they may start others
                each.end()
            if work.num_pending:
                self._leave_to_thread()
        return work

    # ------------------------------------------------------------------ bytes move

    def _move(self, *, waits: bool = False) -> list[HostWork] | None:
        """Move what can be moved, under the lock; returns the calls that ended, None if nothing moved.

        ``waits``: this thread waits for one of them.
        """
        for peer in self.sending:  # nobody must be told that a call went well which failed elsewhere
            if self._segments[peer].left.value == GIVEN_UP:
                self.close(f"Connection closed by peer: rank {peer} {GAVE_UP}")
        if self.failure is not None:  # what calls have kept may be gone
            return None
        heard = set[int]()  # ranks that have something to do, and are told at the end, or after a large piece
        try:
            for end in itertools.chain(self.sending.values(), self.receiving.values()):
                while end.queue and (count := (message := end.queue[0]).move()):
                    for each in message.ends:
                        heard.add(each.peer)
                        if count == PIECE:
                            self._segments[each.peer].ring(self.rank, self.size)
            for peer in heard:
                self._segments[peer].ring(self.rank, self.size)
        except BaseException as error:  # nobody knows what was moved
            self.close(f"Connection closed: a call through memory failed on a rank: {message_of(error)}")
            raise
        if not heard:
            return None
        ended = [work for work in self._works if not work.num_pending]
        for work in ended:
            self._works.remove(work)
        if ended and len(self._waiting) > waits:  # another thread may sleep that waits for it
            self._segments[self.rank].ring(self.rank, self.size)
        return ended

    def wait(self, work: HostWork, seconds: float) -> None:
        """Move bytes until a call has ended, or failed."""
        deadline = time.monotonic() + seconds
        while work.num_pending and self.failure is None:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"Timed out waiting {seconds} s for a call on this host")
            with HandlersLater():
                self._wait(work, min(deadline, time.monotonic() + _LONGEST))

    def _wait(self, work: HostWork, deadline: float) -> None:
        self._waiting.append(work)
        try:
            while work.num_pending and self.failure is None and (left := deadline - time.monotonic()) > 0:
                self._move_or_sleep(min(left, _LOOK), work)
        finally:
            self._waiting.remove(work)
            if self._works and not self._waiting:
                self._leave_to_thread()

    def _move_or_sleep(self, seconds: float, work: HostWork | None = None) -> None:
        """Move what can be moved; if there is nothing, sleep, unless the call has ended."""
        own = self._segments[self.rank]
        with self._lock:
            rings = own.bell.value
            ended = self._move(waits=work is not None)
            if ended is None and work is not None and work.is_completed():
                return  # another thread has moved the rest
        if ended is not None:
            for each in ended:
                each.end()
            return
        own.sleep(rings, seconds)
        if time.monotonic() - self._looked >= _LOOK:  # a signal or another rank may wake it more often
            self._looked = time.monotonic()
            self._look()

    def _look(self) -> None:
        """Fail if another rank has ended or left, or this one waits too long."""
        poll = select.poll()
        for fd in self._processes:
            poll.register(fd, select.POLLIN)
        ended_peers = {self._processes[fd] for fd, _ in poll.poll(0)}
        gone = [peer for peer in self.sending if self._segments[peer].left.value or peer in ended_peers]
        with self._lock:
            ended = self._move()
            missing = [peer for peer in gone if self.sending[peer].queue or self.receiving[peer].lacks()]
            if missing:
                self.close(f"Connection closed by peer: rank {missing[0]} of the group has ended")
            elif self._works and time.monotonic() - self._works[0].began > self._limit:
                self.close(f"Timed out waiting {self._limit:g} s for the other ranks of this host")
        for work in ended or ():
            work.end()

    def release(self) -> None:
        """Take part no more, with nothing that failed: what this rank has sent counts. Takes no lock."""
        self.close("Connection closed: this rank has released its process group", gives_up=False)

    def close(self, why: str, *, gives_up: bool = True) -> None:
        """Give up: all pending calls fail, here and elsewhere. Takes no lock."""
        if os.getpid() != self._process or self.failure is not None:
            return
        self.failure = why
        self._segments[self.rank].left.value = GIVEN_UP if gives_up else LEFT
        for peer in range(self.size):
            self._segments[peer].ring(self.rank, self.size)

    # ------------------------------------------------------------------ the thread

    def _leave_to_thread(self) -> None:
        with self._lock:
            is_new, self._is_served = not self._is_served, True
        if is_new:
            try:
                start_thread(self._serve, "zero_optim host memory")
            except RuntimeError as error:  # Python ends, or the system has no more: whoever waits moves
                self._is_served = False
                if any(work.then is not None for work in list(self._works)):  # perhaps nobody does
                    self.close(f"Connection closed: this rank can start no thread for its calls: {error}")
                    self._end_rest()

    def _serve(self) -> None:
        num_seen, since = 0, 0.0
        time.sleep(_GRACE)
        while self.failure is None:
            if self._works and not self._waiting:
                self._move_or_sleep(_LOOK)
                continue
            now = time.monotonic()
            with self._lock:
                if num_seen != self.num_started:
                    num_seen, since = self.num_started, now
                elif not self._works and now - since >= _IDLE:
                    self._is_served = False
                    return
            time.sleep(_GRACE)  # and is not woken: it would contend with the caller for the interpreter
        self._end_rest()

    def _end_rest(self) -> None:
        """End the calls that a failure leaves."""
        with self._lock:
            works, self._works = self._works, []
            for end in itertools.chain(self.sending.values(), self.receiving.values()):
                end.queue.clear()  # it would refer to this memory
        for work in works:
            work.end(self.failure)


# Those whose threads must end before Python does.
_ALL: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for memory in list(_ALL):
        memory.release()


def _end(peer: int, segments: Sequence[Segment], sender: int, receiver: int) -> End:
    """Return an end of a ring in the sender's segment, which has one for each other rank."""
    segment, start = segments[sender], first_ring(len(segments))
    length = (segment.pages.numel() - start) // (len(segments) - 1)
    ring = segment.pages[start + (receiver - (receiver > sender)) * length :][:length]
    return End(peer, segment.words, 2 * receiver, ring)


def first_ring(size: int) -> int:
    """Return where rings begin: behind a line, and two for each rank."""
    return -(-LINE * (1 + 2 * size) // 4096) * 4096
