"""Two emulated hosts: network namespaces connected by a slow link. Only root can make them."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000  # <sched.h>


@dataclass(frozen=True)
class Link:
    """A pair of namespaces; rank r is in namespace r."""

    names: tuple[str, str]
    interface: str

    def enter(self, rank: int) -> None:
        """Move this process, which must have one thread only, into its namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.names[rank]).open("rb") as handle:
            if libc.setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.names[rank]}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def require_root() -> None:
    """End with one line, not a traceback, if links cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        lacking = f"the commands {' and '.join(missing)} (iproute2)" if missing else "root, on Linux"
        sys.exit(f"an emulated link needs {lacking}: run the benchmark without --link to measure loopback")


@contextmanager
def emulated(rate: str = "1gbit") -> Iterator[Link]:
    """Connect two new namespaces by a link, for the time of a ``with``; it has the rate in each direction."""
    names = (f"zero-{os.getpid()}-a", f"zero-{os.getpid()}-b")
    interface = "veth-zero"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            interface,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            interface,
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", interface, "up")
            shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", *shape)
        yield Link(names, interface)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"cannot make an emulated link: {' '.join(command)}: {done.stderr.strip()}")
