"""Ranks that complain at the same time, in several groups of a mesh, or to ranks that end: one verdict."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scripted_peers import Group, Network, network
from waiting import LIMIT, wait_until
from zero_optim.comm.traffic import Phase
from zero_optim.comm.work_log import Verdict
from zero_optim.comm.works import Work
from zero_optim.health import directory as directory_module
from zero_optim.health.peers import Listener, Presence
from zero_optim.health.tree import cut
from zero_optim.health.verdicts import Verdicts

MESH = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def waits_in(peers: Network, rank: int, line: tuple[int, ...], kept: list[Group]) -> Work:
    """Begin a work of one rank in its row or column of a mesh."""
    log, group = peers.peers[rank].log, Group()
    kept.append(group)
    log.wholes[line] = peers.ranks
    work = Work(log.of(group, line, None, can_cut=False), Phase(name="reduce", timeout=1.0), f"{line}")  # type: ignore[arg-type]
    work.waiting_since = peers.now
    work.group.pending.add(work)
    return work


def test_ranks_that_complain_in_two_groups_of_a_mesh_at_the_same_time_have_one_verdict() -> None:
    rows, columns = MESH
    kept: list[Group] = []
    with network(4) as peers:
        works = [waits_in(peers, 0, columns[0], kept), waits_in(peers, 1, rows[0], kept)]
        both = threading.Barrier(2)

        def complain(rank: int) -> None:
            both.wait(LIMIT)
            peers.peers[rank].verdicts.look_at_wait(works[rank], 1.0)

        threads = [threading.Thread(target=complain, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        (verdict,) = set(peers.verdicts().values())
    # The group of the rank that waits is judged first.
    assert verdict.missing in ((2,), (3,), (2, 3)), verdict


class Sockets:
    """Watchdogs of some ranks behind sockets of this process, each with its thread."""

    def __init__(self, peers: Network) -> None:
        self.over = threading.Event()
        self.listeners = [Listener("127.0.0.1") for _ in peers.ranks]
        addresses = {rank: each.address for rank, each in enumerate(self.listeners)}
        for peer in peers.peers:
            peer.verdicts._directory._addresses = addresses
        self.threads = [
            threading.Thread(target=self.listen, args=(each, peer.verdicts), daemon=True)
            for each, peer in zip(self.listeners, peers.peers, strict=True)
            if peer.verdicts._directory.rank not in peers.mute
        ]
        for thread in self.threads:
            thread.start()

    def listen(self, listener: Listener, verdicts: Verdicts) -> None:
        while not self.over.is_set():
            if listener.wait(LIMIT):
                listener.answer(verdicts.answer)

    def close(self) -> None:
        self.over.set()
        for each in self.listeners:
            each.wake()
        for thread in self.threads:
            thread.join(LIMIT)
        for each in self.listeners:
            each.close()


@pytest.fixture
def sockets_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Sockets] = []

    def build(peers: Network) -> Sockets:
        made.append(Sockets(peers))
        return made[-1]

    yield build
    for each in made:
        each.close()


def test_all_ranks_that_complain_at_the_same_time_hear_one_verdict_through_sockets(sockets_of: Any) -> None:
    """One of them asks all."""
    size, absent = 70, (3, 40)
    ask, in_threads = directory_module.ask, directory_module.in_threads
    with network(size) as peers:
        peers.mute = dict.fromkeys(absent, Presence.ENDED)
        links = sockets_of(peers)
        for rank in absent:
            links.listeners[rank].close()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory_module, "ask", lambda address, question: ask(address, question, LIMIT))
            patch.setattr(directory_module, "in_threads", in_threads)
            patch.setattr(directory_module, "ANSWER_LIMIT", LIMIT)
            works = {rank: peers.waits(rank, peers.now, 5.0) for rank in peers.ranks if rank not in absent}
            threads = [
                threading.Thread(
                    target=peers.peers[rank].verdicts.look_at_wait, args=(work, 6.0), daemon=True
                )
                for rank, work in works.items()
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: None not in peers.verdicts().values())
            for thread in threads:
                thread.join(LIMIT)
    (verdict,) = set(peers.verdicts().values())
    assert verdict.missing == absent
    assert set(peers.looks) == {0}


@pytest.mark.parametrize("says", [Presence.SILENT, Presence.ENDED])
def test_ranks_hear_a_verdict_though_one_that_was_to_pass_it_on_has_gone(says: Presence) -> None:
    with network(200) as peers:
        for rank in peers.ranks:
            peers.waits(rank, peers.now, 5.0)
        (first, stop) = cut(1, 200)[3]
        assert stop - first > 1
        give_up = Verdicts._give_up

        def go_first(verdicts: Verdicts, *args: Any) -> None:
            peers.mute[first] = says
            give_up(verdicts, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Verdicts, "_give_up", go_first)
            peers.now += 6
            peers.looks_at(77)
        (verdict,) = set(peers.verdicts().values())
    assert verdict is not None


def test_a_rank_that_is_to_exit_first_passes_the_verdict_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with network(200) as peers:
        first, stop = cut(1, 200)[3]
        below = range(first, stop)
        ended: list[list[Verdict | None]] = []
        heard = lambda: [peers.peers[rank].log.verdicts.get(peers.ranks) for rank in below]  # noqa: E731
        monkeypatch.setattr(os, "_exit", lambda code: ended.append(heard()))
        verdicts = peers.peers[first].verdicts
        verdicts.exits = True
        question = {"ranks": [[0, 199, 1]], "verdict": ["why", [3]], "stop": stop}
        list(verdicts.answer(question))
    assert ended == [[Verdict("why", (3,))] * len(below)]
