"""Watchdogs of many ranks without processes: objects behind a network with a clock of its own.

A call of `in_threads` takes as long as its longest calls, `FAN` at a time; nothing runs at once.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from zero_optim.comm.traffic import Phase
from zero_optim.comm.work_log import Verdict, WorkLog
from zero_optim.comm.works import Work
from zero_optim.health.directory import Directory
from zero_optim.health.peers import ANSWER_LIMIT, Address, Presence, has_second_line
from zero_optim.health.tree import FAN, Message, from_runs
from zero_optim.health.verdicts import Verdicts

TRIP = 0.002  # seconds of a question and its answer


class Group:
    """Stands for a process group without backends, so there is nothing to abort."""

    _device_types = ()
    group_name = "group"


@dataclass
class Peer:
    """What one rank has."""

    verdicts: Verdicts
    log: WorkLog
    group: Group = field(default_factory=Group)
    work: Work | None = None


class Network:
    """Ranks, of which some say nothing, or something else than an answer."""

    def __init__(self, size: int, mute: Mapping[int, Presence]) -> None:
        self.ranks = tuple(range(size))
        self.mute = dict(mute)
        self.now = 1000.0
        self.sent = Counter[int]()  # bytes by rank
        self.looks: list[int] = []  # who asked all others
        self.most_at_once = 0
        self._speaks = [0]
        addresses = {rank: Address("10.0.0.1", rank, "", "") for rank in self.ranks}
        self.peers = [self._peer(rank, addresses) for rank in self.ranks]

    def _peer(self, rank: int, addresses: dict[int, Address]) -> Peer:
        directory: Any = Directory.__new__(Directory)
        directory.rank, directory.is_current = rank, lambda: True
        directory._addresses, directory._unsure = addresses, set()
        log = WorkLog()
        return Peer(Verdicts(log, directory), log)

    def waits(
        self, rank: int, since: float, timeout: float, about: str = "bucket 0", own: float | None = None
    ) -> Work:
        """Have a rank wait."""
        peer = self.peers[rank]
        group: Any = peer.group
        works = peer.log.of(group, self.ranks, None, can_cut=False)
        works.limit = timeout
        work = peer.work = Work(works, Phase(name="gather", timeout=own), about)
        work.waiting_since = since
        works.pending.add(work)
        return work

    def looks_at(self, rank: int) -> None:
        """Have the watchdog of a rank look at its wait."""
        work = self.peers[rank].work
        self._speaks = [rank]
        if work is not None and work.waiting_since is not None:
            self.peers[rank].verdicts.look_at_wait(work, self.now - work.waiting_since)

    def verdicts(self) -> dict[int, Verdict | None]:
        """Return what each rank has heard that runs."""
        return {
            rank: self.peers[rank].log.verdicts.get(self.ranks)
            for rank in self.ranks
            if rank not in self.mute
        }

    def ask(self, address: Address, question: Message, _patience: float = 0.0) -> Message | Presence:
        """Bring a question and the answer, as `peers.ask`."""
        source, rank = self._speaks[-1], address.port
        text = json.dumps(question)
        self.sent[source] += len(text)
        if rank in self.mute:
            if self.mute[rank] is not Presence.ENDED:
                self.now += ANSWER_LIMIT
            return self.mute[rank]
        self.now += TRIP
        self._speaks.append(rank)
        lines = self.peers[rank].verdicts.answer(json.loads(text))
        answer = self._line(rank, lines)
        if has_second_line(question):
            answer |= self._line(rank, lines)
        assert next(lines, None) is None
        self._speaks.pop()
        return answer

    def _line(self, rank: int, lines: Iterator[Message]) -> Message:
        text = json.dumps(next(lines))
        self.sent[rank] += len(text)
        return dict(json.loads(text))

    def in_threads(self, calls: Mapping[int, Callable[[], Any]], _limit: float) -> dict[int, Any]:
        """Make calls as if at the same time."""
        free, results = [self.now] * FAN, {}
        self.most_at_once = max(self.most_at_once, min(FAN, len(calls)))
        for number, call in calls.items():
            self.now = heapq.heappop(free)
            results[number] = call()
            heapq.heappush(free, self.now)
        self.now = max(self.now, *free)
        return results

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def network(size: int, mute: Mapping[int, Presence] | Sequence[int] = ()) -> Iterator[Network]:
    """Ranks whose watchdogs ask through a scripted network in the body."""
    silent = mute if isinstance(mute, Mapping) else dict.fromkeys(mute, Presence.SILENT)
    made = Network(size, silent)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    kept: dict[str, tuple[int, ...]] = {}  # one tuple for all ranks, which each of them would have

    def numbers(runs: Sequence[Any]) -> tuple[int, ...]:
        text = json.dumps(runs)
        known = kept.setdefault(text, from_runs(runs))
        return made.ranks if known == made.ranks else known

    look = Verdicts._look_into

    def noted_look(verdicts: Verdicts, *args: Any) -> None:
        made.looks.append(verdicts._directory.rank)
        look(verdicts, *args)

    where = "zero_optim.health"
    with (
        mock.patch(f"{where}.directory.ask", made.ask),
        mock.patch(f"{where}.directory.in_threads", made.in_threads),
        mock.patch.object(Verdicts, "_look_into", noted_look),
        mock.patch(f"{where}.verdicts._beside", lambda work: work()),
        mock.patch(f"{where}.verdicts.from_runs", numbers),
        mock.patch(f"{where}.verdicts.time", clock),
        mock.patch(f"{where}.diagnosis.time", clock),
    ):
        yield made
