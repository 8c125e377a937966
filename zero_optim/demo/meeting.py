"""Where the launcher and the ranks of ``--survive`` meet: files in a private folder, as no socket is safe.

Note [Rounds]
    A round is a set of processes that form one process group. The launcher names the first one, and a new one
    whenever a process has died: only it can know who lives. The processes of a round come together: each says
    that it is there, and waits for the others. If a newer round is named meanwhile, they go to that one. So a
    group is only formed by processes that have left the old one, and nobody waits for a dead one. Each round
    has a store of its own, a file, which does not end with any process.

    A rank that raises cannot know whether another one has died or it is to blame. It reports, lets go of its
    group, and waits. If nobody has died, the launcher ends the run with the earliest report.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

_POLL = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Round:
    """Processes that form a group.

    Attributes:
        number: of the round, from 0.
        members: numbers of the processes, by rank in the group. A process keeps its number.
        news: what happened to the ranks of the round before; empty in the first.
    """

    number: int
    members: tuple[int, ...]
    news: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """The folder.

    Attributes:
        folder: on this host, of this run only; exists.
    """

    folder: Path

    # ------------------------------------------------------------------ the launcher

    def name(self, found: Round) -> None:
        """Name a round, in one step."""
        part = self.folder / "round.part"
        part.write_text(json.dumps(asdict(found)))
        part.rename(self._round(found.number))

    def failure(self, process: int) -> Path:
        """Return the file in which a process says why it ends."""
        return self.folder / f"failure-{process}"

    def report(self, number: int, process: int) -> Path:
        """Return the file in which a process says what it raised in a round."""
        return self.folder / f"report-{number}-{process}"

    # ------------------------------------------------------------------ the ranks

    def rounds_after(self, number: int) -> list[Round]:
        """Wait until there is a round behind ``number``; gives all of them, the newest last."""
        while not self._round(number + 1).exists():
            time.sleep(_POLL)
        found = []
        while self._round(number + 1).exists():
            number += 1
            fields = json.loads(self._round(number).read_text())
            found.append(Round(number, tuple(fields["members"]), fields["news"]))
        return found

    def come(self, found: Round, process: int) -> bool:
        """Wait until every process of a round is there; False as soon as there is a newer round."""
        self._place(found, process).touch()
        while not all(self._place(found, other).exists() for other in found.members):
            if self._round(found.number + 1).exists():
                return False
            time.sleep(_POLL)
        return True

    def store(self, found: Round) -> dist.Store:  # type: ignore[name-defined]
        """Open the store of a round."""
        return dist.FileStore(str(self.folder / f"store-{found.number}"), len(found.members))  # type: ignore[attr-defined]

    def _round(self, number: int) -> Path:
        return self.folder / f"round-{number}"

    def _place(self, found: Round, process: int) -> Path:
        return self.folder / f"place-{found.number}-{process}"
