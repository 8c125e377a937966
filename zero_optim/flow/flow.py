"""Started work that nobody has waited for yet. Does not communicate itself."""

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Startable(Protocol):
    """Something that was started."""

    def wait(self) -> object:
        """Wait; False if another stream that uses the result must wait, too."""
        ...


Started = TypeVar("Started", bound=Startable)


@dataclass(slots=True, eq=False)
class _Entry:
    work: Startable
    size: float
    keys: tuple[Hashable, ...]
    is_unclaimed: bool = True
    is_over: bool = False  # no stream has to wait any more

    def wait(self) -> None:
        if not self.is_over:
            self.is_unclaimed, self.is_over = False, True  # also if it fails
            self.is_over = self.work.wait() is not False


class Flow:
    """Work under way, in the order of its start.

    The sum of its sizes is at most ``most``: before more is started, the oldest is waited for. On an
    accelerator work stays until it is over, as each stream that reads must wait. Two threads may use one
    flow: one may step during backward, while checkpointing runs a forward pass.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._entries: deque[_Entry] = deque()
        self._by_key: dict[Hashable, list[_Entry]] = {}
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
            return any(entry.is_unclaimed for entry in self._entries)

    def start(self, begin: Callable[[], Started], size: float = 1, keys: Iterable[Hashable] = ()) -> Started:
        """Start work when it fits beside the rest; ``keys`` are what `wait_for` will ask for."""
        with self._lock:
            while self._entries and sum(entry.size for entry in self._entries) + size > self._most:
                self.finish_first()
        work = begin()
        entry = _Entry(work, size, tuple(keys))
        with self._lock:
            self._entries.append(entry)
            for key in entry.keys:
                self._by_key.setdefault(key, []).append(entry)
        return work

    def finish_first(self) -> None:
        """Wait for the oldest work."""
        with self._lock:
            entry = self._entries.popleft()
            entry.wait()
            if entry.is_over:
                self._drop_keys(entry)

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Let the current stream, or on the CPU the caller, wait for the work with some keys."""
        with self._lock:
            for key in keys:
                for entry in self._by_key.pop(key, ()):
                    entry.wait()
                    if not entry.is_over:
                        self._by_key.setdefault(key, []).append(entry)
            self._forget()

    def wait(self) -> None:
        """Let the current stream, or on the CPU the caller, wait for all work, in the order of its start."""
        with self._lock:
            for _ in range(len(self._entries)):
                entry = self._entries.popleft()  # if the wait raises, the rest stays
                entry.wait()
                self._entries.append(entry)
            if self._entries:
                self._forget()

    def abandon(self) -> None:
        """Drop all work; the backend keeps its memory until it is done."""
        with self._lock:
            self._entries.clear()
            self._by_key.clear()

    def _forget(self) -> None:
        """Drop what is over, or parameters would keep the work of every step."""
        over = [entry for entry in self._entries if entry.is_over]
        if over:
            self._entries = deque(entry for entry in self._entries if not entry.is_over)
        for entry in over:
            self._drop_keys(entry)

    def _drop_keys(self, entry: _Entry) -> None:
        for key in entry.keys:
            left = [one for one in self._by_key.pop(key, ()) if one is not entry]
            if left:
                self._by_key[key] = left
