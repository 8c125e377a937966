"""What a process that is a rank settles with its host before any work: its end, its network, its cores."""

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
    """Have this process killed as soon as its parent is gone; called once, before any work.

    Args:
        parent: process id of the starter. If it has gone by now, this process ends at once.
    """
    if not _ask_kernel():
        threading.Thread(target=watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:  # it went before the kernel was asked
        os._exit(1)


def _ask_kernel() -> bool:
    """Arrange it with Linux, which acts at once, and even while this process hangs in C++."""
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


def use_loopback() -> None:
    """Have process groups made from now on talk over the loopback interface: for ranks of one host.

    gloo listens where the host's name leads otherwise, where others may reach it. NCCL listens too, until its
    ranks have found each other; an interface that the user has named for it stays.
    """
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def num_cores() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
