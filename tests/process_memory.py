"""How much memory the system counts for this process, in bytes. Linux alone tells."""

import ctypes
from pathlib import Path


def resident_nbytes() -> int:
    return _status("VmRSS")


def anonymous_nbytes() -> int:
    """What is resident but for pages of files: the system drops those of a library at any time."""
    return _status("RssAnon")


def peak_nbytes() -> int:
    """The most that was resident at a time, since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS


def trim() -> None:
    """Gives back what the C library keeps of freed memory to use again."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
