"""The set-up of a rank on its host: its end, its network interface."""

import ctypes
import os
import signal
import socket

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process with its parent (a process id), even if it hangs in C++; called once."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "Linux does not kill a rank with its parent")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def use_loopback() -> None:
    """Make later process groups use the loopback interface, which no other machine reaches."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
