"""Where the threads of a hung process are in C++, which Python's own stacks do not tell.

The backend's threads send and receive. Where a wait for them hangs, their stacks, and what still lies in the
sockets, say whether data was never sent, never read, or read and forgotten.
"""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_LIMIT = 60  # seconds: reading PyTorch's symbols takes ten
_FRAMES = 14


def native_stacks(pid: int) -> str:
    """Give the stacks of all threads as gdb shows them, and the sockets that hold data.

    Without gdb, or without the right to look, the text says so.
    """
    return f"{_stacks(pid)}\n{_filled_sockets()}"


def _stacks(pid: int) -> str:
    if shutil.which("gdb") is None:
        return "no stacks in C++: gdb is not installed"
    command = ["gdb", "--nx", "--batch", "-p", str(pid), "-ex", f"thread apply all backtrace {_FRAMES}"]
    try:
        found = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"no stacks in C++: gdb took longer than {_LIMIT} s"
    threads = [line for line in found.stdout.splitlines() if line.startswith(("Thread ", "#"))]
    return "\n".join(threads) or "\n".join([f"no stacks in C++: {found.stderr.strip()}", *_threads(pid)])


def _threads(pid: int) -> list[str]:
    """List the threads with their states: a process whose first thread has ended may have others that run."""
    shown = []
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it has ended
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            where = (folder / "wchan").read_text()
            shown.append(f"thread {name}), state {rest.split()[0]}, waits in {where}")
    return shown


def _filled_sockets() -> str:
    """List the connections of this host with bytes that were not sent, or not read."""
    shown = ["connections that hold data (local, remote, state, bytes not sent : not read, in hexadecimal):"]
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, queues = line.split()[:5]
            if queues != "00000000:00000000":
                shown.append(f"{local} {remote} {state} {queues}")
    return "\n".join(shown)
