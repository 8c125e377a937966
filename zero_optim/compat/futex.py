"""Waiting for a word of shared memory to change: Linux's futex, by its system call."""

import ctypes
import platform
import sys
from functools import lru_cache
from typing import Any

_NUMBER = 202  # of the system call on x86-64
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache
def _system_call() -> Any:  # noqa: ANN401 - a function of the C library
    call = ctypes.CDLL(None).syscall
    address, number = ctypes.c_void_p, ctypes.c_long
    call.argtypes = (number, address, number, number, address, address, number)
    return call


def has_futex() -> bool:
    """Return whether `wait` and `wake` work here."""
    # Other processors may show a word before what was written ahead of it, and Python cannot forbid that.
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at an address has this value, until `wake`, at most so long."""
    time = _Time(int(seconds), int(seconds % 1 * 1e9))
    _system_call()(_NUMBER, address, _WAIT, value, ctypes.addressof(time), None, 0)


def wake(address: int) -> None:
    """Wake the threads of all processes that wait for a word."""
    _system_call()(_NUMBER, address, _WAKE, _ALL, None, None, 0)
