"""What the caller of `launch` and its ranks tell each other, by files in a folder.

Note [Which failure is reported]
    When a rank fails, the others lose their connections and fail as well, and may end first. So each rank
    writes down the time of its exception before it closes anything. The earliest one is the cause. A killed
    rank writes nothing, and comes before those. An exception that only repeats that of another rank comes
    last, and is waited for least: `zero_optim.run.host.let_the_cause_end_first`.
"""

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: the rank.
        order: smaller for causes than for consequences.
        text: the traceback, or what is known without one.
        line: the kind of exception, or the same as ``text``.
    """

    rank: int
    order: list[int]
    text: str
    line: str


@dataclass(frozen=True, slots=True)
class Job:
    """What both the caller and the ranks know.

    Attributes:
        folder: where they leave files for each other.
        nproc: number of ranks.
        backend: of their process group.
        threads: PyTorch's threads on each rank.
        parent: process id of the caller.
    """

    folder: str
    nproc: int
    backend: str
    threads: int
    parent: int

    def path(self, name: str, rank: int | None = None) -> Path:
        """Name a file, of one rank or of all."""
        return Path(self.folder, name if rank is None else f"{name}-{rank}")

    def failures(self, processes: Sequence[BaseProcess]) -> list[Failure]:
        """List the ranks that have failed so far, the cause first."""
        found = (self._failure(rank, process.exitcode) for rank, process in enumerate(processes))
        return sorted(filter(None, found), key=lambda failure: failure.order)

    def _failure(self, rank: int, exitcode: int | None) -> Failure | None:
        if self.path("failure", rank).exists():
            return Failure(**json.loads(self.path("failure", rank).read_text()))
        if exitcode is None or (exitcode == 0 and self.path("value", rank).exists()):
            return None
        line = f"was killed by {_signal(-exitcode)}" if exitcode < 0 else f"ended with status {exitcode}"
        why = ""
        if not self.path("begun", rank).exists():
            why = (
                " before it could begin: what it printed says why. A script that calls launch() needs "
                '`if __name__ == "__main__":` around that code, since the ranks import the script'
            )
        return Failure(rank, [0, rank], line + why, line)

    def write_failure(self, failure: Failure) -> None:
        """Write the file about a failure, in one step."""
        path = self.path("failure", failure.rank)
        path.with_suffix(".part").write_text(json.dumps(asdict(failure)))
        path.with_suffix(".part").rename(path)

    def is_told(self) -> bool:
        """Tell whether every rank has left its value, or why it failed."""
        return all(
            any(self.path(name, rank).exists() for name in ("failure", "value")) for rank in range(self.nproc)
        )

    def values(self) -> list[Any]:
        """Read what the ranks returned."""
        return [torch.load(self.path("value", rank), weights_only=False) for rank in range(self.nproc)]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
