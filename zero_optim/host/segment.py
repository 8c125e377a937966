"""A segment: pages of one rank that the other ranks of its host map too. No communication.

Note [Segments without names]
    A segment is an anonymous file (`memfd_create`): it has no name that a killed job could leave behind,
    and no limit as ``/dev/shm`` has in containers. Another process of the user maps it by
    ``/proc/PID/fd/N``. All pages are reserved at once, so a write cannot end in a bus error.

Its rank sleeps until a word of it, the bell, changes: Linux's futex, by its system call.
"""

import ctypes
import itertools
import os
import platform
import secrets
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

LINE = 64  # bytes that processors exchange
TOKEN_NBYTES = 16
_NAME = "zero_optim"
LEFT, GIVEN_UP = 1, 2
_LEFT_AT = TOKEN_NBYTES  # in the first line, which has the token, whether the rank has left, and its bell
_FUTEX = 202  # the system call's number on x86-64
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
    """Return whether bells work here."""
    # Other processors may show a word before what was written ahead of it, and Python cannot forbid that.
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


class Segment:
    """``nbytes`` of memory in the process ``pid``, as its descriptor ``fd``: the first lines hold words.

    OSError for anything else.
    """

    def __init__(self, nbytes: int, num_words: int, pid: int, fd: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            own = Path(f"/proc/self/fd/{opened}")
            # The number may be a file of another process.
            if os.fstat(opened).st_size != nbytes or not str(own.readlink()).startswith(f"/memfd:{_NAME} "):
                raise OSError(f"{path} is no memory of {nbytes} bytes that a rank has made")
            self.pages = torch.from_file(str(own), shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(opened)
        self.address = self.pages.data_ptr()
        # 0 while its rank takes part, then `LEFT` or `GIVEN_UP`, whose messages count no more.
        self.left = ctypes.c_uint32.from_address(self.address + _LEFT_AT)
        self.bell = ctypes.c_uint32.from_address(self.address + _LEFT_AT + 4)
        self._rings = itertools.count(1)  # of this process
        # A word a line, so that two writers do not take a line from each other.
        self.words: Any = (ctypes.c_uint64 * (num_words * LINE // 8)).from_address(self.address + LINE)

    @classmethod
    def new(cls, nbytes: int, num_words: int) -> "tuple[Segment, int]":
        """Return a new one of this process, and its descriptor; OSError if there is no memory."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, nbytes)
            segment = cls(nbytes, num_words, os.getpid(), fd)
        except BaseException:
            os.close(fd)
            raise
        ctypes.memmove(segment.address, secrets.token_bytes(TOKEN_NBYTES), TOKEN_NBYTES)
        return segment, fd

    def ring(self, by: int, of: int) -> None:
        """Show a value that nobody has shown, and wake whoever sleeps; ``by`` one of so many ranks."""
        # Then nobody misses it, whoever rings at the same time.
        self.bell.value = (next(self._rings) * of + by) % 2**32
        _system_call()(_FUTEX, ctypes.addressof(self.bell), _WAKE, _ALL, None, None, 0)

    def sleep(self, value: int, seconds: float) -> None:
        """Sleep while the bell shows this value, at most so long."""
        time = _Time(int(seconds), int(seconds % 1 * 1e9))
        at = ctypes.addressof(self.bell)
        _system_call()(_FUTEX, at, _WAIT, value, ctypes.addressof(time), None, 0)

    @property
    def token(self) -> str:
        """Return what only its readers can know."""
        return ctypes.string_at(self.address, TOKEN_NBYTES).hex()
