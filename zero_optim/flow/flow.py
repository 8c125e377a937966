"""Started work that nobody has waited for yet. Does not communicate itself."""

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from zero_optim.compat.signals import wait_for
from zero_optim.compat.streams import StreamBeside, is_asynchronous
from zero_optim.compat.threads import start_thread
from zero_optim.flow.pending import Pending


@dataclass(slots=True, eq=False)
class _Entry:
    work: Pending[Any]
    keys: frozenset[Hashable]
    device: torch.device | None
    is_behind: bool
    end: threading.Event | None  # of work on a thread


class Flow:
    """Works under way, in the order of their start; at most so many, ``most``.

    On an accelerator work stays until it is over, as each stream that reads must wait; so does work that
    failed, and each wait raises that, until `abandon`. Two threads may use a flow. With ``streams`` an extra
    stream waits for the work, and `wait` lets the current one wait for that. A ``thread`` starts the work and
    waits for it.
    """

    def __init__(
        self,
        most: float = math.inf,
        *,
        streams: StreamBeside | None = None,
        thread: "Worker | None" = None,
    ) -> None:
        self._most = most
        self._streams = streams
        self._is_apart = False  # something waits on extra streams that the current one has not waited for
        self._thread = thread
        self._entries: deque[_Entry] = deque()
        self._lock = threading.RLock()  # waiting for work may start more

    def __reduce__(self) -> "tuple[type[Flow], tuple[float]]":
        """Copy and pickle without the work, which uses the original's memory."""
        return Flow, (self._most,)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_unclaimed(self) -> bool:
        """Whether somebody has still to wait for some work."""
        with self._lock:
            return any(entry.work.is_unclaimed for entry in self._entries)

    def start(
        self,
        begin: Callable[[], Pending[Any]],
        keys: Iterable[Hashable] = (),
        device: torch.device | None = None,  # of the work, which has a stream there, with ``streams``
        *,
        is_behind: bool = False,  # ``begin`` lets the work wait for what it reads: `finish_first` need not
    ) -> None:
        """Start work when there are less than ``most``. ``keys`` are what `wait_for` will ask for."""
        with self._lock:
            while self._entries and len(self._entries) >= self._most:
                self.finish_first()
        end: threading.Event | None = None
        if self._thread is None:
            work = begin()
        else:
            work = Pending([], lambda _: begin().wait())
            end = self._thread.run(work)
        if device is not None and not is_asynchronous(device):
            device = None
        self._is_apart |= device is not None
        with self._lock:
            self._entries.append(_Entry(work, frozenset(keys), device, is_behind, end))

    def finish_first(self) -> None:
        """Wait for the oldest work."""
        with self._lock:
            entry = self._entries[0]
            self._wait(entry, in_turn=True)
            self._drop(entry)

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Let the current stream, or on the CPU the caller, wait for the work with some keys."""
        with self._lock:
            wanted = frozenset(keys if self._entries else ())
            for entry in tuple(self._entries):
                if entry.work.has_failed or not entry.keys.isdisjoint(wanted):
                    self._wait(entry)
                if entry.work.is_over:
                    self._drop(entry)

    def wait(self) -> None:
        """Let the current stream, or on the CPU the caller, wait for all work, in the order of its start."""
        with self._lock:
            for entry in tuple(self._entries):
                self._wait(entry)
                if entry.work.is_over:
                    self._drop(entry)
        if self._streams is not None and self._is_apart:
            self._streams.join()
            self._is_apart = False

    def abandon(self) -> None:
        """Drop all work; the backend keeps its memory until it is done."""
        with self._lock:
            self._entries.clear()

    def _wait(self, entry: _Entry, *, in_turn: bool = False) -> None:
        """Wait with the extra stream, if any, behind the current one, or ``in_turn`` of later work."""
        stream: AbstractContextManager[None] = nullcontext()
        if self._streams is not None and entry.device is not None:
            use = self._streams.using if in_turn and entry.is_behind else self._streams.behind
            stream = use(entry.device)
        if entry.end is not None:
            try:
                wait_for(entry.end)
            finally:
                wait_for(entry.end)  # also after a Ctrl-C: the thread goes on to write
        with stream:
            entry.work.wait()

    def _drop(self, entry: _Entry) -> None:
        with suppress(ValueError):  # what came of it has waited in its place
            self._entries.remove(entry)


_Job: TypeAlias = tuple[Pending[Any], threading.Event]


class Worker:
    """A thread for `Flow`, which runs work in order. It ends with this object or the process."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        end = partial(self._jobs.put, None)
        start_thread(partial(_run_all, self._jobs), name)
        weakref.finalize(self, end).atexit = False
        atexit.register(end)  # before `zero_optim.compat.threads` waits for all: it was registered earlier

    def run(self, work: Pending[Any]) -> threading.Event:
        """Wait for some work after what came before; returns an event at its end, also if it fails."""
        end = threading.Event()
        self._jobs.put((work, end))
        return end


def _run_all(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        work, end = job
        with suppress(BaseException):  # each later wait raises it
            work.wait()
        del job, work  # with what it holds
        end.set()
