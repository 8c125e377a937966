"""How much memory the system counts for this process, in bytes. Linux alone tells."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread


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


def least_growth(tour: Callable[[str, str], list[float]], small: str, large: str) -> float:
    """Return the MiB that the largest of a tour's calls adds; the tour takes a source, and names of results.

    What the allocator keeps varies from run to run and only adds: the least of three counts. The tour of the
    small source loads the code.
    """
    tour(small, f"{small}-small")
    return min(max(tour(large, f"{large}-large-{number}")) for number in range(3))


def growth(tool: Callable[..., object], *args: object) -> float:
    """Return the MiB of memory that is mapped from no file, at most, during a call."""
    trim()
    before, done = anonymous_nbytes(), Event()
    marks = [before]

    def watch() -> None:  # the kernel keeps no mark of the peak of these
        while not done.wait(0.002):
            marks.append(anonymous_nbytes())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        tool(*args)
    finally:
        done.set()
        watcher.join()
    return (max(marks) - before) / 2**20
