"""Started work that nobody has waited for yet. Does not communicate itself."""

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from zero_optim.compat.signals import wait_for
from zero_optim.compat.streams import StreamBeside
from zero_optim.compat.threads import start_thread


class Startable(Protocol):
    """Something that was started."""

    def wait(self) -> object:
        """Wait; False if another stream that uses the result must wait, too."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    work: Startable
    size: float
    keys: tuple[Hashable, ...]
    behind: Callable[[], AbstractContextManager[None]]  # uses the stream that waits, behind the current one
    in_turn: Callable[[], AbstractContextManager[None]]  # the same, in the turn of later work
    is_unclaimed: bool = True
    is_over: bool = False  # no stream has to wait any more

    def wait(self, *, in_turn: bool = False) -> None:
        if not self.is_over:
            self.is_unclaimed, self.is_over = False, True  # also if it fails, see `Flow`
            with self.in_turn() if in_turn else self.behind():
                self.is_over = self.work.wait() is not False


class Flow:
    """Work under way, in the order of its start; the sum of its sizes is at most ``most``.

    On an accelerator work stays until it is over, as each stream that reads must wait. Two threads may use a
    flow. With ``streams`` an extra stream waits for the work, and `wait` lets the current one wait for that.
    A ``thread`` starts the work and waits for it; one wait raises what fails there. After another wait has
    failed each later one raises the same, as the results never come, until `abandon`.
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
        self._by_key: dict[Hashable, list[_Entry]] = {}
        self._lock = threading.RLock()  # waiting for work may start more
        self._failure: tuple[type[Exception], tuple[object, ...]] | None = None  # without its frames

    def __reduce__(self) -> "tuple[type[Flow], tuple[float]]":
        """Copy and pickle without the work, which uses the original's memory."""
        return Flow, (self._most,)

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """Whether a wait has something to do, or to raise."""
        return bool(self._entries) or self._failure is not None

    @property
    def is_unclaimed(self) -> bool:
        """Whether somebody has still to wait for some work."""
        with self._lock:
            return any(entry.is_unclaimed for entry in self._entries)

    def start(
        self,
        begin: Callable[[], Startable],
        size: float = 1,
        keys: Iterable[Hashable] = (),
        device: torch.device | None = None,  # of the work's stream, with ``streams``
        *,
        is_behind: bool = False,  # ``begin`` lets the work wait for what it reads: `finish_first` need not
    ) -> None:
        """Start work when it fits beside the rest. ``keys`` are what `wait_for` will ask for."""
        with self._lock:
            while self._entries and size + sum(entry.size for entry in self._entries) > self._most:
                self.finish_first()
        work = begin() if self._thread is None else self._thread.run(lambda: begin().wait())
        behind: Callable[[], AbstractContextManager[None]] = nullcontext
        in_turn = behind
        if self._streams is not None and device is not None:
            behind, self._is_apart = partial(self._streams.behind, device), True
            in_turn = partial(self._streams.using, device) if is_behind else behind
        entry = _Entry(work, size, tuple(keys), behind, in_turn)
        with self._lock:
            self._entries.append(entry)
            for key in entry.keys:
                self._by_key.setdefault(key, []).append(entry)

    def finish_first(self) -> None:
        """Wait for the oldest work."""
        with self._waiting():
            entry = self._entries.popleft()
            entry.wait(in_turn=True)
            if entry.is_over:
                self._drop_keys(entry)

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Let the current stream, or on the CPU the caller, wait for the work with some keys."""
        with self._waiting():
            for key in keys if self._by_key else ():
                for entry in self._by_key.pop(key, ()):
                    entry.wait()
                    if not entry.is_over:
                        self._by_key.setdefault(key, []).append(entry)
            over = [entry for entry in self._entries if entry.is_over]
            for entry in over:
                self._entries.remove(entry)
                self._drop_keys(entry)

    def wait(self) -> None:
        """Let the current stream, or on the CPU the caller, wait for all work, in the order of its start."""
        with self._waiting():
            for _ in range(len(self._entries)):
                entry = self._entries.popleft()  # if the wait raises, the rest stays
                entry.wait()
                if entry.is_over:  # or parameters would keep the work of every step
                    self._drop_keys(entry)
                else:
                    self._entries.append(entry)
        if self._streams is not None and self._is_apart:
            self._streams.join()
            self._is_apart = False

    def abandon(self) -> None:
        """Drop all work; the backend keeps its memory until it is done."""
        with self._lock:
            self._entries.clear()
            self._by_key.clear()
            self._failure = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Hold the lock; raise what an earlier wait raised, and keep what this one raises."""
        with self._lock:
            if self._failure is not None:
                kind, args = self._failure
                raise kind(*args)
            try:
                yield
            except Exception as error:
                if self._thread is None:
                    self._failure = type(error), error.args
                raise

    def _drop_keys(self, entry: _Entry) -> None:
        for key in entry.keys:
            left = [one for one in self._by_key.pop(key, ()) if one is not entry]
            if left:
                self._by_key[key] = left


class Worker:
    """A thread for `Flow`, which runs work in order. It ends with this object or the process."""

    def __init__(self, name: str) -> None:
        self._works: SimpleQueue[_Run | None] = SimpleQueue()
        self.end = partial(self._works.put, None)
        start_thread(partial(_run_all, self._works), name)
        weakref.finalize(self, self.end).atexit = False
        _WORKERS.add(self)

    def run(self, work: Callable[[], object]) -> "_Run":
        """Run some work after what came before."""
        run = _Run(work)
        self._works.put(run)
        return run


class _Run:
    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._error: BaseException | None = None
        self._end = threading.Event()

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None  # it runs once
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._end.set()

    def wait(self) -> None:
        try:
            wait_for(self._end)
        finally:
            wait_for(self._end)  # also after a Ctrl-C, or nobody would wait for it
        if self._error is not None:
            raise self._error


def _run_all(works: "SimpleQueue[_Run | None]") -> None:
    while (work := works.get()) is not None:
        work.run()
        del work


_WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register  # before `zero_optim.compat.threads` waits for all, as that was registered earlier
def _end_workers() -> None:
    for worker in list(_WORKERS):
        worker.end()
