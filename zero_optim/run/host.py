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
from collections.abc import Callable

from zero_optim.errors import StalledError, is_heard_of

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 1.0  # seconds
_TELLING = 0.05  # seconds between two looks at whether the others have told why they failed
CAUSE = 120.0  # seconds that a rank which only heard of a failure gives the one that failed, on a busy host
_LOST = 10.0  # seconds for ranks that do not answer, or have closed their connections
_CLOSED = ("onnection closed by peer", "onnection reset by peer")  # what gloo says, and NCCL


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


def order_of(error: BaseException) -> int:
    """Place a failure among those of all ranks: the lowest is the most likely to be the cause.

    Returns:
        1 for what this rank did itself; 3 for what it only heard of, or for a connection that another rank
        has closed; 2 if that came while the rank dealt with a failure of its own.
    """
    if not is_heard_of(error) and not _is_closed(error):
        return 1
    # What a wait raised is `__cause__`; what was raised before the wait began is the context of that.
    waited = error.__cause__ or error
    before = waited.__context__
    return 2 if before is not None and order_of(before) < 3 else 3


def _is_closed(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _CLOSED)


def let_the_cause_end_first(error: BaseException, all_have_told: Callable[[], bool]) -> None:
    """Wait before this rank ends, if it only heard that another one has failed.

    A launcher ends all ranks when the first one has ended. If that is a rank that only heard of a failure,
    the rank that failed may be killed before it has written down why: it may be slow to, on a busy host.
    The launcher ends this wait, with the process, when the other rank has ended. The wait also ends when
    nobody is left who could tell more. Its limit is for a rank that does not go on: one that is stopped, or
    that has caught its exception.

    Args:
        error: what this rank raised; it is written down already.
        all_have_told: whether all ranks of this job have told how they ended.
    """
    if order_of(error) == 1:
        return
    is_told = is_heard_of(error) and not isinstance(error, StalledError)
    deadline = time.monotonic() + (CAUSE if is_told else _LOST)
    while time.monotonic() < deadline and not all_have_told():
        time.sleep(_TELLING)


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
