"""The set-up of a rank on its host before any work: when it ends, its network interface, its cores.

The functions that run on each rank call these: `run.launch`, ``demo`` and the tests. Nothing communicates.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time

from zero_optim.errors import RemoteRankError, StalledError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 1.0  # seconds
_CAUSE = 10.0  # seconds that a rank which only heard of a failure gives the one that failed


def end_with_parent(parent: int) -> None:
    """Kill this process as soon as its parent is gone; called once, before any work.

    Args:
        parent: process id of the parent. If it is gone already, this process ends at once.
    """
    if not _ask_kernel():
        threading.Thread(target=watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _ask_kernel() -> bool:
    """Ask Linux to kill this process, which works at once, even if it hangs in C++; False if Linux cannot."""
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


def let_the_cause_end_first(error: BaseException) -> None:
    """Wait before this rank ends, if it only heard that another one has failed.

    A launcher ends all ranks when the first one has ended. If that is a rank that only heard of a failure,
    the rank that failed may be killed before it has written down why. The launcher ends this wait, with the
    process, when the other rank has ended. Ranks named by a `StalledError` have ended already, or hang:
    they are not waited for.

    Args:
        error: what this rank raised; it is written down already.
    """
    if isinstance(error, RemoteRankError) and not isinstance(error, StalledError):
        time.sleep(_CAUSE)


def use_loopback() -> None:
    """Make later process groups use the loopback interface; for jobs on one host.

    Otherwise gloo listens on the address of the host's name, which other machines may reach. NCCL listens
    too, until its ranks have found each other; an interface that the user chose for NCCL stays.
    """
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def num_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
