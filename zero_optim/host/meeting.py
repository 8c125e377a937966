"""The meeting of a group's ranks: who shares memory with whom is told, shown, and agreed."""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zero_optim.host.channel import padded
from zero_optim.host.messages import OneHost
from zero_optim.host.segment import Segment, has_futex
from zero_optim.host.several_hosts import SeveralHosts
from zero_optim.host.shared_memory import first_ring

_MOST = 2**22  # bytes of a rank's rings
_LEAST = 2**16  # bytes of one ring

Tell = Callable[[Any], list[Any]]  # tells all ranks a JSON value, and returns what each of them told
Connect = Callable[[Sequence[int], str], dist.ProcessGroup]  # makes a group of some of the ranks, with a name


class Met(NamedTuple):
    """What ranks have told each other, equal on all: ``hosts`` are the ranks of each, by the lowest."""

    hosts: Sequence[Sequence[int]]
    why_not: str  # why a rank can share no memory; or ""
    name: str  # for groups of some of them

    @classmethod
    def by(cls, tell: Tell) -> "Met":
        """Tell; communicates once."""
        is_able = has_futex() and hasattr(os, "pidfd_open")
        why_not = "" if is_able else "this system lacks what sharing memory needs: Linux on x86-64"
        everyone, hosts = tell([_host(), why_not, secrets.token_hex(8)]), dict[str, list[int]]()
        for rank, (host, *_) in enumerate(everyone):
            hosts.setdefault(host, []).append(rank)
        why_not = next((why for _, why, _ in everyone if why), "")
        return cls(tuple(hosts.values()), why_not, f"zero_optim:{everyone[0][2]}")

    @property
    def why_one_level(self) -> str:
        """Why ranks of several hosts do not send inside a host first; or ""."""
        sizes = {*map(len, self.hosts)}
        if len(sizes) > 1:
            return "the ranks are on several hosts, and not as many on each"
        return "the ranks are on several hosts, one on each" if len(self.hosts) > 1 and sizes == {1} else ""


def open_shared_memory(
    rank: int, hosts: Sequence[Sequence[int]], limit: float, tell: Tell, connect: Connect
) -> tuple[OneHost | SeveralHosts | None, str]:
    """Return what sends through memory, or None and why; the same on every rank. ``limit``: of a call."""
    here = next(host for host in hosts if rank in host)
    own, fds = list[Segment](), list[int]()
    others, why = len(here) - 1, ""
    nbytes = first_ring(len(here)) + others * max(_LEAST, padded(_MOST // others))
    try:
        try:
            for _ in range(min(2, len(hosts))):  # of several hosts one for each way: see `SeveralHosts`
                segment, fd = Segment.new(nbytes, 2 * len(here))
                own.append(segment)
                fds.append(fd)
        except (OSError, RuntimeError) as error:
            why = f"no {nbytes} bytes of shared memory: {error}"
        tokens = [segment.token for segment in own]
        everyone = tell({"pid": os.getpid(), "fds": fds, "tokens": tokens, "why": why})
        why = next((place["why"] for place in everyone if place["why"]), "")
        memories = list[OneHost]()
        if not why:
            places = [everyone[other] for other in here]
            with suppress(OSError, RuntimeError):
                memories = [_mapped(here.index(rank), way, own, places, limit) for way in range(len(own))]
        if not all(tell(bool(memories))):
            return None, why or "not every rank can map the memory of the others"
    finally:
        for fd in fds:
            os.close(fd)  # the others have mapped it
    if len(hosts) == 1:
        return memories[0], ""
    number, name = here.index(rank), f"zero_optim:{everyone[0]['tokens'][0]}"
    across = connect([host[number] for host in hosts], f"{name}:{number}")
    return SeveralHosts(memories[0], memories[1], across, hosts, rank), ""


def _mapped(
    rank: int, way: int, own: Sequence[Segment], places: Sequence[dict[str, Any]], limit: float
) -> OneHost:
    """Map the others' segments; OSError if one has another token."""
    nbytes, size = own[way].pages.numel(), len(places)
    segments = [
        own[way] if other == rank else Segment(nbytes, 2 * size, place["pid"], place["fds"][way])
        for other, place in enumerate(places)
    ]
    if any(place["tokens"][way] != there.token for place, there in zip(places, segments, strict=True)):
        raise OSError("another process has taken the number of a rank")
    return OneHost(rank, segments, [place["pid"] for place in places], limit)


def _host() -> str:
    """Name this host, its network (emulated hosts differ in that) and its processes (containers do)."""
    spaces = ""
    with suppress(OSError):
        spaces = " ".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {spaces}"
