"""Threads beside the others, which are waited for when the process ends."""

import atexit
import threading
from collections.abc import Callable

_LONGEST = 5.0  # seconds: another rank, or the host of the store, may be stopped


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Do something on a thread of its own.

    A thread that comes back from PyTorch while the interpreter ends aborts the process (exit status 134), as
    Python ends it inside PyTorch's code. When a verdict makes the waits of this process raise, the process
    often ends at once, while such a thread still breaks connections. So it is waited for before, some
    seconds.

    Args:
        work: to do.
        name: of the thread.
    """

    def run() -> None:
        try:
            work()
        finally:
            atexit.unregister(wait)

    def wait() -> None:
        thread.join(_LONGEST)

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(wait)
    thread.start()
    return thread
