"""The watchdog: one thread a process, which checks the library's waits and answers other ranks.

It lives as long as an optimizer or DDP of several ranks. See Note [Waits that end] in `comm.work_log`.

Note [Watching NCCL]
    With NCCL the CPU does not wait, and a stream cannot raise. So the watchdog queries one work of each
    group. If it is late, or ranks have ended, each rank logs the verdict, aborts its communicators, and
    raises from the next work and in `RankGroup.read`.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.work_log import WorkLog, explain_nothing, log_of
from zero_optim.compat.autograd import address_of_store
from zero_optim.compat.streams import asking
from zero_optim.health.directory import Directory
from zero_optim.health.peers import Listener, host_towards
from zero_optim.health.verdicts import Verdicts

OnStall = Literal["raise", "exit"]


def check_patience(timeout: object, on_stall: object = "raise") -> None:
    """Raise ValueError for a wrong ``timeout`` or ``on_stall``."""
    if not _fits(timeout):
        raise ValueError(f"expected timeout to be seconds above 0, None, or a pair of these, got {timeout!r}")
    if on_stall not in get_args(OnStall):
        raise ValueError(f'expected on_stall to be "raise" or "exit", got {on_stall!r}')


def _fits(timeout: Any) -> bool:  # noqa: ANN401 - the user's
    longest, apart = timeout if type(timeout) is tuple and len(timeout) == 2 else (timeout, 1)
    numbers = [apart] if longest is None else [longest, apart]
    return all(type(number) in (int, float) and number > 0 for number in numbers)


def patient(group: RankGroup, timeout: Any) -> RankGroup:  # noqa: ANN401 - the user's
    """Return the same ranks with ``timeout``, unless it is wrong."""
    return group if timeout is None or not _fits(timeout) else group.within(timeout)


def watch(user: object, group: RankGroup, on_stall: object = "raise") -> None:
    """Keep a watchdog while ``user`` lives, in a group of several ranks. No communication."""
    world = dist.group.WORLD
    if group.size == 1 or world is None:
        return
    watchdog = _WATCHDOGS.get(world)
    is_added = watchdog is not None and watchdog.add(user, group, on_stall)
    if not is_added and Directory.can_be_kept():
        is_first = world not in _WATCHDOGS
        watchdog = _WATCHDOGS[world] = Watchdog(log_of(world), world)
        watchdog.add(user, group, on_stall)
        watchdog.start(is_first=is_first)


def unwatch(user: object) -> None:
    """Drop a user that released its process group."""
    for watchdog in list(_WATCHDOGS.values()):
        watchdog.drop(user)


@contextmanager
def watching(group: RankGroup) -> Iterator[None]:
    """Keep a watchdog in the body, without optimizer or DDP."""
    user = _User()
    watch(user, group)
    yield


class _User:
    """An object that communicates while it lives."""


def learn_addresses(group: RankGroup) -> None:
    """Read all watchdogs' addresses from the store, once; all exist."""
    world = dist.group.WORLD
    watchdog = None if world is None else _WATCHDOGS.get(world)
    if watchdog is not None and 1 < group.size <= 1024:  # else each reads those that it asks
        watchdog.directory.learn(group.works.ranks)


class Watchdog:
    """Checks the waits of this process, and answers other ranks."""

    def __init__(self, log: WorkLog, world: dist.ProcessGroup) -> None:
        current = weakref.ref(world)
        self.directory = Directory(lambda: current() is not None and dist.group.WORLD is current())
        self._verdicts = Verdicts(log, self.directory)
        self._users: WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = WeakKeyDictionary()
        self._interval = 1.0  # seconds between two looks at the waits, at most
        self._lock = threading.RLock()  # a signal handler may build and save too
        self._is_over = False
        self._listener = Listener(host_towards(*address_of_store()))
        self._thread = threading.Thread(target=self._run, name="zero_optim watchdog", daemon=True)

    def start(self, *, is_first: bool) -> None:
        """Start the thread; it ends with the interpreter or the last user."""
        _LISTENERS.add(self._listener)
        self._verdicts.log.explain = self._verdicts.explain
        self.directory.publish(self._listener.address, is_first=is_first)
        self._thread.start()
        atexit.register(self.end)

    def add(self, user: object, group: RankGroup, on_stall: object) -> bool:
        """Live as long as an object; False if the watchdog has ended."""
        with self._lock:
            if self._is_over:
                return False
            if user not in self._users:
                finalizer = weakref.finalize(user, self._listener.wake)  # called after it has left the users
                finalizer.atexit = False
                self._users[user] = finalizer
        self._verdicts.exits |= on_stall == "exit"
        limit = min(group.phase.limits(group.works.limit))
        self._interval = min(self._interval, max(limit / 20, 0.05))
        self._listener.wake()
        return True

    def drop(self, user: object) -> None:
        """Drop a user, if it was added."""
        with self._lock:
            finalizer = self._users.pop(user, None)
        if finalizer is not None:
            finalizer.detach()
            self._listener.wake()

    def end(self) -> None:
        """End the thread and wait for it; the interpreter calls it at exit."""
        self._end_if_unused(at_once=True)
        self._listener.wake()
        self._thread.join(3.0)  # seconds, at most, that the end of the process waits

    def _run(self) -> None:
        try:
            while not self._end_if_unused():
                if self._listener.wait(self._interval):
                    self._listener.answer(self._verdicts.answer)
                self._look()
        finally:
            self._end_if_unused(at_once=True)
            self._listener.close()
            atexit.unregister(self.end)

    def _end_if_unused(self, *, at_once: bool = False) -> bool:
        with self._lock:
            if not self._is_over:  # else another watchdog may have begun
                is_needed = self._users or self._verdicts.has_failure()
                self._is_over = at_once or not is_needed or not self.directory.is_current()
                if self._is_over:
                    self._verdicts.log.explain = explain_nothing
            return self._is_over

    def _look(self) -> None:
        for work in self._verdicts.log.waits():
            since = work.waiting_since
            if since is not None:  # another thread may just have ended the wait
                self._verdicts.look_at_wait(work, time.monotonic() - since)
        for works in list(self._verdicts.log.groups.values()):
            if works.failure:
                self._verdicts.look_at_failed_step(works)
            late = works.outstanding
            if late is None or late.late_on is None:
                continue
            with asking(late.late_on):  # see Note [Watching NCCL]
                is_gone = works.group() is None
                if is_gone or late.is_completed():
                    works.outstanding = None
                    self._verdicts.look_at_failure(late, None if is_gone else late.exception())
                else:
                    self._verdicts.look_at_wait(late, time.monotonic() - late.started)
                del late  # perhaps the last reference: what it has of the device goes with the device in use


def _close_in_child() -> None:
    for listener in list(_LISTENERS):
        listener.close()


# By the default group, as in `zero_optim.comm.work_log`.
_WATCHDOGS: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()
_LISTENERS: WeakSet[Listener] = WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
