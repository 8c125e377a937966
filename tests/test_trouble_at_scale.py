"""Many ranks, of which some do not answer: one rank asks, in a tree, and all hear one verdict."""

import logging
import random

import pytest

from scripted_peers import Network, network
from zero_optim.health.peers import Presence
from zero_optim.health.tree import FAN

TIMEOUT = 600.0
HUGE = 16384


def all_wait(peers: Network, busy: tuple[int, ...] = (), own: float | None = None) -> None:
    for rank in peers.ranks:
        if rank not in peers.mute and rank not in busy:
            peers.waits(rank, peers.now + rank % 7 / 2, TIMEOUT, own=own)


def look_everywhere(peers: Network) -> None:
    ranks = [rank for rank in peers.ranks if rank not in peers.mute]
    random.Random(1).shuffle(ranks)
    for rank in ranks:
        peers.looks_at(rank)


def give_up(peers: Network) -> float:
    """All wait too long; returns the seconds until all that run have one verdict."""
    all_wait(peers)
    peers.now += TIMEOUT + 5
    began = peers.now
    look_everywhere(peers)
    verdicts = set(peers.verdicts().values())
    assert len(verdicts) == 1
    (verdict,) = verdicts
    assert verdict.missing == tuple(sorted(peers.mute))
    assert len(verdict.message) <= 2048
    assert peers.most_at_once <= FAN
    return peers.now - began


@pytest.mark.exhaustive
def test_a_hundred_silent_ranks_of_very_many_are_named_in_ten_seconds() -> None:
    silent = sorted(random.Random(0).sample(range(HUGE), 100))
    with network(HUGE, silent) as peers:
        assert give_up(peers) <= 10.0
        message = str(peers.verdicts()[2].message)  # type: ignore[union-attr]
    assert f"each of ranks {', '.join(map(str, silent))} does not answer: " in message


@pytest.mark.parametrize("size", [2, 33, 34, 100, pytest.param(1100, marks=pytest.mark.slow)])
def test_one_silent_rank_is_named_wherever_it_is(size: int) -> None:
    for silent in {0, 1, size // 2, size - 1}:
        with network(size, [silent]) as peers:
            assert give_up(peers) <= 10.0


@pytest.mark.slow
@pytest.mark.parametrize("says", [Presence.SILENT, Presence.ENDED])
def test_a_host_of_eight_silent_or_ended_ranks_is_named_wherever_it_is(says: Presence) -> None:
    for first in (0, 8, 32, 1096):
        with network(1200, dict.fromkeys(range(first, first + 8), says)) as peers:
            assert give_up(peers) <= 10.0


def test_the_lowest_rank_that_answers_asks_all_others_once() -> None:
    with network(1200, [0, 1, 2]) as peers:
        give_up(peers)
    assert peers.looks == [3]


def test_who_cannot_be_connected_to_is_not_named_while_another_rank_is_silent() -> None:
    mute = {5: Presence.UNCONNECTED, 9: Presence.SILENT, 11: Presence.UNKNOWN}
    with network(20, mute) as peers:
        all_wait(peers)
        peers.now += TIMEOUT + 5
        look_everywhere(peers)
        (verdict,) = set(peers.verdicts().values())
    assert verdict.missing == (9,)


def test_who_cannot_be_connected_to_is_named_where_nothing_else_is_known() -> None:
    with network(20, {5: Presence.UNCONNECTED}) as peers:
        give_up(peers)


@pytest.mark.exhaustive
def test_a_wait_behind_one_slow_save_of_very_many_ranks_sends_little_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(HUGE) as peers, caplog.at_level(logging.WARNING, "zero_optim"):
        all_wait(peers, busy=(0,))
        for _ in range(5):  # minutes
            peers.now += 64
            look_everywhere(peers)
        assert set(peers.verdicts().values()) == {None}
        assert max(peers.sent.values()) < 2**16
    (said,) = caplog.messages
    assert "rank 0 waits for nothing" in said
    assert len(said) < 2048


def test_ranks_whose_devices_wait_for_one_that_is_slow_look_once_too() -> None:
    with network(100) as peers:
        all_wait(peers, busy=(0,))
        began = peers.now
        for peer in peers.peers[1:]:
            work = peer.work
            work.group.pending.clear()
            work.group.outstanding, work.started, work.waiting_since = work, began, None
        peers.now += 61
        for peer in peers.peers[1:]:
            assert peer.work is not None
            peer.verdicts.look_at_wait(peer.work, peers.now - began)
    assert peers.looks == [0]


def test_ranks_that_wait_for_each_other_give_up_after_a_minute_though_some_begin_late() -> None:
    with network(100) as peers:
        for rank in peers.ranks:
            peers.waits(
                rank, peers.now + 30 * (rank == 70), TIMEOUT, "bucket 1" if rank == 70 else "bucket 0"
            )
        peers.now += 65
        look_everywhere(peers)
        assert set(peers.verdicts().values()) == {None}
        peers.now += 30
        look_everywhere(peers)
        (verdict,) = set(peers.verdicts().values())
    assert verdict is not None
    assert "every rank waits, but not for the same" in verdict.message
    assert "rank 70 waits in the gather of bucket 1" in verdict.message


def test_ranks_with_the_timeout_of_the_group_do_not_wait_for_that_of_one_with_a_longer_one() -> None:
    with network(4) as peers:
        peers.waits(1, peers.now, TIMEOUT, "bucket 1", own=TIMEOUT)
        for rank in (0, 2, 3):
            peers.waits(rank, peers.now + 5, TIMEOUT)
        peers.now += 61
        look_everywhere(peers)
        assert set(peers.verdicts().values()) == {None}
        peers.now += 5
        look_everywhere(peers)
        assert None not in peers.verdicts().values()
