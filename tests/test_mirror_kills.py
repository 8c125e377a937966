"""Ranks are killed at any moment, by a seed; what is left goes on from mirrors, with the bits of no fault."""

import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cuts import finely_cut
from ddp_pairs import mlp
from survivors import KINDS, Trainer, begin_process, run_until_killed
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads
from worlds import enter
from zero_optim import StalledError, ZeroRedundancyOptimizer
from zero_optim.state import mirror

AHEAD = 6  # steps of the run without a fault, from where the last one went on
MIRRORED = 1.3  # calls of functions in a step with mirrors, for one without


def trainer(kind: str, *, mirror: bool) -> Trainer:
    return Trainer(kind, mlp(), ema_decay=0.9, mirror=mirror)


def step(of: Trainer, number: int) -> None:
    of.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
    of.train(number, number + 1)


def whole(of: Trainer) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters and state; all ranks call."""
    of.optimizer.wait_for_gathers()
    of.optimizer.consolidate_state_dict(to=None)
    return [param.detach().clone() for param in of.model.parameters()], of.optimizer.state_dict()


@dataclass
class Doom:
    """Counts calls of any function, Python's or C's, and kills this process after the last one."""

    last: int = sys.maxsize
    calls: int = 0

    def __call__(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls > self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def survive(folder: Path, rank: int, size: int, result: Any, seed: int) -> None:
    """Train while one rank after the other is killed, until one is left; sends the steps gone back to."""
    begin_process(folder, rank, size)
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    went = []
    with finely_cut():
        me = trainer(kind, mirror=True)
        members, first = list(range(size)), 0
        known: dict[int, tuple[list[Tensor], dict[str, Any]]] = {}
        while len(members) > 1:
            doomed, iteration, share = chance.choice(members), chance.randrange(AHEAD - 2), chance.random()
            known, calls = run_without_fault(kind, first, known.get(first))
            doom = Doom(int(MIRRORED * share * calls)) if doomed == rank else None
            ended = train_until_killed(me, first, first + iteration, doom)
            members.remove(doomed)
            me.leave()
            enter(folder, f"without {doomed}", members.index(rank), len(members))
            back = me.rebind()
            about = (seed, kind, doomed, iteration, share)
            assert ended - 1 <= back <= ended + 1, (*about, ended, back)
            params, state = whole(me)
            assert_same_bits(params, known[back][0], about)
            assert_same_state(state, known[back][1])
            went.append(back)
            first = back
    dist.destroy_process_group()
    result.send((seed, rank, went))


def run_without_fault(
    kind: str, first: int, saved: Any
) -> tuple[dict[int, tuple[list[Tensor], dict[str, Any]]], int]:
    """Run without mirrors; gives the whole by number of steps, and calls of functions in the last step."""
    other, counter = trainer(kind, mirror=False), Doom()
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(other.model.parameters(), saved[0], strict=True):
                param.copy_(value)
        other.optimizer.load_state_dict(saved[1])
    known = {first: saved if saved is not None else whole(other)}
    for number in range(first, first + AHEAD):
        counter.calls = 0
        sys.setprofile(counter)
        step(other, number)
        sys.setprofile(None)
        known[number + 1] = whole(other)
    other.detach()
    return known, counter.calls


def train_until_killed(me: Trainer, first: int, last: int, doom: Doom | None) -> int:
    """Train until this process is killed in step ``last``, or another; gives how many steps have ended."""
    ended = first
    try:
        for number in range(first, first + 100):
            if number == last:
                sys.setprofile(doom)
            step(me, number)
            ended += 1
    except StalledError:
        return ended
    raise AssertionError("nobody was killed")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fifty_kills_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    kills = 0
    for seed in range(10):
        for size in (3, 4):
            [(_, _, went)] = run_until_killed(tmp_path / f"{size} {seed}", survive, size, 1, 10 * seed + size)
            kills += len(went)
    assert kills == 50


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_are_left_go_back_to_a_step_that_all_of_them_have(tmp_path: Path, seed: int) -> None:
    [(_, _, went)] = run_until_killed(tmp_path, survive, 3, 1, seed)
    assert len(went) == 2


def die_sending(folder: Path, rank: int, size: int, result: Any, number: int) -> None:
    """Rank 1 dies while it sends a version of some MiB; what has left by then is not whole."""
    begin_process(folder, rank, size)
    params = make_params(((512, 1024), (700, 300), (40,)))
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, mirror=True)
    if rank == 1:
        start_send, calls = mirror.start_send, [0]

        def sending(*arguments: Any) -> Any:
            calls[0] += 1
            work = start_send(*arguments)
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work

        mirror.start_send = sending
    try:
        for step in range(1000):
            set_grads(params, step)
            optimizer.step()
    except StalledError:
        ended = step
    optimizer.detach()
    dist.destroy_process_group()
    enter(folder, "left", rank // 2, 2)
    back = optimizer.rebind()
    plain = torch.optim.AdamW(make_params(((512, 1024), (700, 300), (40,))), lr=0.01)
    for step in range(back + 2):
        set_grads(params_of(plain), step)
        plain.step()
        if step >= back:
            set_grads(params, step)
            optimizer.step()
    assert_same_bits(params, params_of(plain))
    dist.destroy_process_group()
    result.send((rank, number - 1 - back, ended - back))


@pytest.mark.parametrize("number", [1, 3])
def test_a_version_of_which_only_a_part_has_arrived_is_not_gone_back_to(tmp_path: Path, number: int) -> None:
    got = run_until_killed(tmp_path, die_sending, 3, 2, number)
    assert [rank for rank, *_ in got] == [0, 2]
    for _, steps_back, repeated in got:
        assert steps_back in (0, 1)  # as much as gloo still sent of what was started
        assert repeated in (0, 1)
