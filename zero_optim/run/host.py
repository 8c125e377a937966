"""The set-up of a rank on its host: its end, its network interface, its cores."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 1.0  # seconds


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent (a process id) is gone; called once, before any work."""
    if not _ask_kernel():
        threading.Thread(target=watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _ask_kernel() -> bool:
    """Ask Linux to kill this process with its parent, even if it hangs in C++; False if it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    except (OSError, AttributeError):  # a C library without it
        return False


def watch(parent: int) -> None:
    """Check for the parent once a second, if the kernel does not help. Does not return."""
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


def use_loopback() -> None:
    """Make later process groups use the loopback interface, which no other machine reaches."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
