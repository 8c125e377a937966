"""Threads that the end of the process waits for."""

import _thread  # its threads start in a third less of the time than those of `threading`
import atexit
import os
import time
from collections.abc import Callable

_LONGEST = 5.0  # seconds: another rank, or the host of the store, may be stopped

# For each thread begun, or about to be, a lock that is held until it has ended. A thread that begins while
# Python ends could not register a callback of its own.
_RUNNING: set[_thread.LockType] = set()


def start_thread(work: Callable[[], object]) -> _thread.LockType:
    """Run ``work`` on a new thread; returns a lock that is held until it has ended.

    The end of the process waits for it, at most 5 s: a thread that returns from PyTorch while the interpreter
    ends aborts the process (exit status 134). That is likely after a group was given up, while such a thread
    breaks connections.
    """
    running = _thread.allocate_lock()
    running.acquire()

    def run() -> None:
        try:
            work()
        finally:
            _RUNNING.discard(running)
            running.release()

    _RUNNING.add(running)
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # Python ends, or the system has no more threads
        _RUNNING.discard(running)
        raise
    return running


def _wait_for_all() -> None:
    deadline = time.monotonic() + _LONGEST
    while (left := deadline - time.monotonic()) > 0 and (running := next(iter(list(_RUNNING)), None)):
        running.acquire(timeout=left)


atexit.register(_wait_for_all)
os.register_at_fork(after_in_child=_RUNNING.clear)
