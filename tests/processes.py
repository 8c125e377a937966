"""What Linux tells of a process: whether it runs, its children, the addresses on which it listens."""

import ipaddress
import struct
from pathlib import Path

_LISTENING = "0A"  # in the table of /proc/net/tcp


def stat(pid: int) -> list[str]:
    """The state of a process and what stands behind it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    return stat(pid)[:1] not in ([], ["Z"])


def children(pid: int) -> list[int]:
    """The running processes that a process has started."""
    others = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [other for other in others if is_alive(other) and stat(other)[1:2] == [str(pid)]]


def listening(pid: int | str) -> list[str]:
    """The addresses, with ports, on which a process listens; ``"self"`` for this process."""
    links = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        found += [_address(row[1]) for row in rows if row[3] == _LISTENING and row[9] in own]
    return found


def reachable_from_outside(pid: int | str) -> list[str]:
    """The addresses of `listening` that are not on the loopback interface."""
    return [
        address
        for address in listening(pid)
        if not ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    ]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed by now
        return ""


def _address(text: str) -> str:
    """Read an address as the kernel prints it: words of four bytes, each in the machine's byte order."""
    digits, port = text.split(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return f"[{mapped or address}]:{int(port, 16)}"
