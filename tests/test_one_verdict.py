"""Ranks that decide at the same time, in different groups of a mesh, give one verdict.

There are no processes: each rank is a `Verdicts` with a log of its own, and a network that says when.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from waiting import LIMIT, wait_until
from zero_optim.comm.records import Verdict
from zero_optim.comm.traffic import Phase
from zero_optim.comm.work_log import GroupWorks, WorkLog
from zero_optim.comm.works import Work
from zero_optim.health import verdicts as verdicts_module
from zero_optim.health.peers import Message, Presence
from zero_optim.health.verdicts import Verdicts

EVERYONE = (0, 1, 2, 3)
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


class Group:
    """Stands for a process group, which is only named and told apart."""

    _device_types = ()  # without backends, so there is nothing to abort

    def __init__(self, name: str) -> None:
        self.group_name = name


@dataclass
class Rank:
    """What one rank has of a mesh of two rows and two columns."""

    number: int
    network: "Network"
    log: WorkLog = field(default_factory=WorkLog)
    groups: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        directory: Any = Directory(self.number, self.network)
        self.verdicts = Verdicts(self.log, directory)

    def waits_in(self, lines: Sequence[tuple[int, ...]]) -> Work:
        """Begin a work in its row or column."""
        (ranks,) = (line for line in lines if self.number in line)
        self.log.wholes[ranks] = EVERYONE
        group: Any = Group(str(ranks))
        self.groups.append(group)
        works: GroupWorks = self.log.of(group, ranks, None, can_cut=False)
        work = Work(works, Phase(name="reduce", timeout=1.0), f"bucket 0 of {ranks}")
        work.waiting().__enter__()
        return work

    def decides(self, work: Work) -> Verdict:
        return self.verdicts._decide(work.group, 1.0)

    @property
    def held(self) -> Verdict | None:
        return self.log.verdicts.get(EVERYONE)


class Network:
    """Brings each question at once; subclasses say otherwise."""

    def __init__(self) -> None:
        self.ranks = [Rank(number, self) for number in EVERYONE]

    def ask(self, source: int, to: int, question: Message) -> Message | Presence:
        """Bring a question, and the answer back."""
        return self.ranks[to].verdicts.answer(question)

    def asked(self, source: int, question: Message) -> None:
        """Be told that a rank has the answers of all that it asked."""


@dataclass
class Directory:
    """What a rank knows of the others."""

    rank: int
    network: Network

    def is_current(self) -> bool:
        return True

    def catch_up(self) -> None:
        """No question waits here."""

    def ask_all(
        self, ranks: Sequence[int], question: Message, _patience: float = 0.0
    ) -> dict[int, Message | Presence]:
        found = {
            place: self.network.ask(self.rank, rank, question)
            for place, rank in enumerate(ranks)
            if rank != self.rank
        }
        self.network.asked(self.rank, question)
        return found


class AtOnce(Network):
    """Ranks 0 and 1 have asked before one of them decides; and no verdict comes before rank 0 has one."""

    def __init__(self) -> None:
        super().__init__()
        self.one_asked, self.zero_asked = threading.Event(), threading.Event()
        self.one_tells = threading.Event()

    def ask(self, source: int, to: int, question: Message) -> Message | Presence:
        if "verdict" in question:
            if source == 1:
                self.one_tells.set()
            wait_until(lambda: self.ranks[0].held is not None)
        return super().ask(source, to, question)

    def asked(self, source: int, question: Message) -> None:
        if "verdict" in question:
            return
        if source == 1:
            self.one_asked.set()
            assert self.zero_asked.wait(LIMIT)
        else:
            self.zero_asked.set()
            assert self.one_tells.wait(LIMIT)


def decide_at_once(network: AtOnce) -> list[Verdict]:
    """Rank 1 asks, then rank 0, then both decide; rank 0 waits in its column, rank 1 in its row."""
    first, second = network.ranks[0].waits_in(COLUMNS), network.ranks[1].waits_in(ROWS)
    found: dict[int, Verdict] = {}
    other = threading.Thread(target=lambda: found.update({1: network.ranks[1].decides(second)}), daemon=True)
    other.start()
    assert network.one_asked.wait(LIMIT)
    found[0] = network.ranks[0].decides(first)
    other.join(LIMIT)
    return [found[0], found[1]]


def test_ranks_that_decide_at_the_same_time_in_two_groups_of_a_mesh_give_one_verdict() -> None:
    network = AtOnce()
    verdicts = decide_at_once(network)
    assert verdicts[0] == verdicts[1]
    assert [rank.held for rank in network.ranks] == [verdicts[0]] * 4


class Without(Network):
    """Some ranks say something else than an answer; from the time on that one is asked to keep a verdict."""

    def __init__(self, *mute: int, says: Presence, first: bool) -> None:
        super().__init__()
        self.mute, self.says, self.is_mute = mute, says, first
        self.kept: list[int] = []

    def ask(self, source: int, to: int, question: Message) -> Message | Presence:
        self.is_mute |= "verdict" in question
        if to in self.mute and self.is_mute:
            return self.says
        if "verdict" in question:
            self.kept.append(to)
        return super().ask(source, to, question)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("says", [Presence.SILENT, Presence.ENDED])
def test_the_lowest_rank_that_answers_keeps_the_verdict(
    monkeypatch: pytest.MonkeyPatch, says: Presence, *, first: bool
) -> None:
    monkeypatch.setattr(verdicts_module, "_LONGEST_END", 0.0)
    network = Without(0, says=says, first=first)
    verdict = network.ranks[2].decides(network.ranks[2].waits_in(ROWS))
    assert network.kept[0] == 1
    assert [rank.held for rank in network.ranks] == [None, *[verdict] * 3]


def test_a_rank_that_is_to_exit_tells_all_others_the_verdict_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network()
    ended: list[list[Verdict | None]] = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append([rank.held for rank in network.ranks]))
    keeper = network.ranks[0].verdicts
    keeper.exits = True
    keeper.answer({"ranks": EVERYONE, "verdict": ["why", [3]], "is_first": True})
    wait_until(lambda: bool(ended))
    assert ended == [[Verdict("why", (3,))] * 4]
