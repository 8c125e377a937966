"""The set-up of a rank on its host: its end, its network interface, its cores."""

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


def order_of(error: BaseException) -> int:
    """Return a failure's place among those of all ranks; the lowest is the likely cause.

    1: by this rank itself; 3: told by another rank, or a connection that one closed; 2: 3 while this rank
    handled its own failure.
    """
    is_closed = isinstance(error, RuntimeError) and any(words in str(error) for words in _CLOSED)
    if not is_heard_of(error) and not is_closed:
        return 1
    # What a wait raised is `__cause__`; what was raised before the wait began is the context of that.
    waited = error.__cause__ or error
    before = waited.__context__
    return 2 if before is not None and order_of(before) < 3 else 3


def let_the_cause_end_first(error: BaseException, all_have_told: Callable[[], bool]) -> None:
    """Delay this rank's end if it only heard of another's failure.

    The launcher ends all ranks soon after the first, so the failed rank might be killed before it has written
    why. The wait ends when all ranks have reported; its limit is for a rank that is stopped or caught its
    error.
    """
    if order_of(error) == 1:
        return
    is_certain = is_heard_of(error) and not isinstance(error, StalledError)
    deadline = time.monotonic() + (CAUSE if is_certain else _LOST)
    while time.monotonic() < deadline and not all_have_told():
        time.sleep(_TELLING)


def use_loopback() -> None:
    """Make later process groups use the loopback interface; for jobs on one host.

    Otherwise gloo, and NCCL until its ranks have met, listen on the address of the host's name, which other
    machines may reach. A user's interface for NCCL stays.
    """
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
