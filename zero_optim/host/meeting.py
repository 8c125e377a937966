"""The meeting of a group's ranks: who shares memory with whom is told, shown, and agreed."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero_optim.compat import futex
from zero_optim.host.channel import padded
from zero_optim.host.segment import Segment
from zero_optim.host.shared_memory import SharedMemory, first_ring

_MOST = 2**22  # bytes of a rank's rings
_LEAST = 2**16  # bytes of one ring

Tell = Callable[[Any], list[Any]]  # tells all ranks a JSON value, and returns what each of them told


def meet(rank: int, size: int, limit: float, tell: Tell) -> tuple[SharedMemory | None, str]:
    """Return this rank's memory, or None where any rank cannot share memory, and why; the same on every rank.

    Communicates twice by ``tell``. ``limit``: seconds that a call may take.
    """
    fd = -1
    try:
        segment, fd, why = _own(size)
        place = {"host": _host(), "pid": os.getpid(), "fd": fd, "why": why}
        places = tell(place | {"token": "" if segment is None else segment.token})
        why = next((each["why"] for each in places if each["why"]), "")
        if not why and len({each["host"] for each in places}) > 1:
            why = "the ranks are on several hosts"
        memory: SharedMemory | None = None
        if not why:
            assert segment is not None  # else there is a reason
            with suppress(OSError, RuntimeError):
                memory = _built(rank, segment, places, limit)
        if not all(tell(memory is not None)):
            return None, why or "not every rank can map the memory of the others"
        return memory, ""
    finally:
        if fd >= 0:
            os.close(fd)  # the others have mapped it


def _own(size: int) -> tuple[Segment | None, int, str]:
    """Return a segment of this rank and its descriptor, or why there is none."""
    if not futex.has_futex() or not hasattr(os, "pidfd_open"):
        return None, -1, "this system lacks what sharing memory needs: Linux on x86-64"
    try:
        return *Segment.new(_nbytes(size), 2 * size), ""
    except (OSError, RuntimeError) as error:
        return None, -1, f"no {_nbytes(size)} bytes of shared memory: {error}"


def _built(rank: int, own: Segment, places: Sequence[dict[str, Any]], limit: float) -> SharedMemory | None:
    """Map the others' segments; None if one has another token."""
    nbytes, size = own.pages.numel(), len(places)
    segments = [
        own if other == rank else Segment(nbytes, 2 * size, place["pid"], place["fd"])
        for other, place in enumerate(places)
    ]
    if any(place["token"] != there.token for place, there in zip(places, segments, strict=True)):
        return None
    return SharedMemory(rank, segments, [place["pid"] for place in places], limit)


def _nbytes(size: int) -> int:
    return first_ring(size) + (size - 1) * max(_LEAST, padded(_MOST // (size - 1)))


def _host() -> str:
    """Name this host, its network (emulated hosts differ in that) and its processes (containers do)."""
    spaces = ""
    with suppress(OSError):
        spaces = " ".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {spaces}"
