"""Emulated hosts: network namespaces connected by slow links. Only root can make them.

Two hosts have one link between them. More have a link each to a switch, a bridge in a namespace of its own.
It holds back what it forwards to a host, as that holds back what it sends. So each host sends and receives at
the rate of its link, at the same time, whoever the others are.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000  # <sched.h>
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # in the notation of tc


@dataclass(frozen=True)
class Link:
    """Namespaces that are connected; each has some ranks, in their order.

    Attributes:
        names: of the namespaces.
        interface: name of the network interface in each of them.
        rate: of each link and direction, in the notation of tc.
        per_host: ranks in each.
    """

    names: tuple[str, ...]
    interface: str
    rate: str
    per_host: int = 1

    def enter(self, rank: int) -> None:
        """Move this process, which must have one thread only, into its namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.names[rank // self.per_host]).open("rb") as handle:
            if libc.setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter a namespace of rank {rank}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    @property
    def nbytes_per_second(self) -> float:
        """The rate of a link in one direction."""
        number = self.rate.rstrip("abcdefghijklmnopqrstuvwxyz")
        return float(number) * _UNITS[self.rate[len(number) :]] / 8

    def nbytes_sent(self) -> int:
        """Read how many bytes the interface of this process, which has entered, has sent, with all headers.

        These are the statistics of ``/sys/class/net``, which shows those of another namespace. A segment that
        the kernel leaves to the interface to cut has one header, as on a card that cuts segments itself.
        """
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == self.interface:
                return int(counts.split()[8])
        raise LookupError(f"no interface {self.interface}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--link`` and ``--rate``, for `rate_of`."""
    parser.add_argument("--link", action="store_true", help="ranks over emulated links; needs root")
    parser.add_argument("--rate", default="1gbit", help="rate of a link, in the notation of tc (1gbit)")


def rate_of(options: argparse.Namespace) -> str | None:
    """Return the rate of the links that were asked for, or None; end with one line if they cannot be made."""
    if not options.link:
        return None
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        lacking = f"the commands {' and '.join(missing)} (iproute2)" if missing else "root, on Linux"
        sys.exit(f"an emulated link needs {lacking}: run the benchmark without --link to measure loopback")
    return str(options.rate)


def linked(rate: str | None, size: int = 2, per_host: int = 1) -> AbstractContextManager[Link | None]:
    """Connect hosts by links of a rate, for the time of a ``with``; None: over loopback, without links."""
    return nullcontext() if rate is None else emulated(rate, size, per_host)


def where(rate: str | None) -> str:
    """Name what connects the ranks, for titles."""
    return "loopback" if rate is None else f"links of {rate}"


@contextmanager
def emulated(rate: str, size: int, per_host: int = 1) -> Iterator[Link]:
    """Connect new namespaces; each link has the rate in each direction."""
    names = tuple(f"zero-{os.getpid()}-{number}" for number in range(size))
    switch, link = f"zero-{os.getpid()}-switch", Link(names, "veth-zero", rate, per_host)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        if size == 2:
            _connect(names[0], link.interface, names[1], link.interface)
        else:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names):
                _connect(name, link.interface, switch, f"port{number}")
                _run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge")
                _start(switch, f"port{number}", rate)
        for number, name in enumerate(names, start=1):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link.interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _start(name, link.interface, rate)
        yield link
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _connect(one: str, interface: str, other: str, peer: str) -> None:
    """Connect two namespaces by a cable."""
    ends = ("netns", one, "type", "veth", "peer", "name", peer, "netns", other)
    _run("ip", "link", "add", "name", interface, *ends)


def _start(name: str, interface: str, rate: str) -> None:
    """Switch an interface on, and hold back what it sends."""
    _run("ip", "-n", name, "link", "set", interface, "up")
    shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"cannot make an emulated link: {' '.join(command)}: {done.stderr.strip()}")
