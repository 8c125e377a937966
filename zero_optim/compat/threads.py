"""Threads that the end of the process waits for."""

import atexit
import os
import threading
import time
from collections.abc import Callable

# Those begun, or about to be. One that begins while Python ends could not register a callback of its own.
_RUNNING: set[threading.Thread] = set()


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Run ``work`` on a new thread; the end of the process, which it would abort, waits at most 5 s."""

    def run() -> None:
        nonlocal work
        try:
            work()
        finally:
            del work  # perhaps the last to refer to tensors, which PyTorch frees
            _RUNNING.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _RUNNING.add(thread)
    try:
        thread.start()
    except RuntimeError:  # Python ends, or the system has no more threads
        _RUNNING.discard(thread)
        raise
    return thread


def start_thread_or_run(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Run ``work`` as `start_thread`; here if the system has no more threads."""
    try:
        return start_thread(work, name)
    except RuntimeError:
        work()
        return None


@atexit.register
def _wait_for_all() -> None:
    deadline = time.monotonic() + 5.0  # another rank, or the host of the store, may be stopped
    while (left := deadline - time.monotonic()) > 0 and (running := next(iter(list(_RUNNING)), None)):
        if running.ident is None:  # another thread is about to start it
            time.sleep(0.01)
        else:
            running.join(left)


os.register_at_fork(after_in_child=_RUNNING.clear)
