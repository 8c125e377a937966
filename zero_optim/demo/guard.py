"""No orphans: a rank ends when the process that started it does, however that one ended."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 1.0  # seconds


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as its parent is gone; called once, before any work.

    Args:
        parent: process id of the starter. If it has gone by now, this process ends at once.
    """
    if not _ask_kernel():
        threading.Thread(target=watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:  # it went before the kernel was asked
        os._exit(1)


def _ask_kernel() -> bool:
    """Arrange it with Linux, which acts at once and even while Python cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    except (OSError, AttributeError):  # a C library without it
        return False


def watch(parent: int) -> None:
    """Look for the parent now and then, where the kernel does not help; never returns while it lives."""
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)
