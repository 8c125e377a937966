"""Ranks are killed at any moment, by a seed; what is left goes on from mirrors, with the bits of no fault."""

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cuts import finely_cut
from ddp_pairs import SMALL_MB, mlp, mlp_loss
from forked import fork_context
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads
from waiting import LIMIT
from worlds import enter
from zero_optim import StalledError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step
from zero_optim.state import mirror

KINDS = ("plain", "overlap", "owners", "sharded", "lazy")
AHEAD = 6  # steps of the run without a fault, from where the last one went on
MIRRORED = 1.3  # calls of functions in a step with mirrors, for one without


class Trainer:
    """A model, its wrapper and its optimizer."""

    def __init__(self, kind: str, *, mirror: bool) -> None:
        self.kind = kind
        model = mlp()
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            lr=0.01,
            ema_decay=0.9,
            gather_lazily=model if kind == "lazy" else None,
            mirror=mirror,
        )
        self.model: DistributedDataParallel
        if kind == "sharded":
            self.model = ShardedDataParallel(model, self.optimizer)
        else:
            self.model = DistributedDataParallel(model, bucket_cap_mb=SMALL_MB)
        self.register()

    def register(self) -> None:
        if self.kind in ("overlap", "owners"):
            to = {"overlap": "everywhere", "owners": "owners"}[self.kind]
            self.model.register_comm_hook(None, zero_step(self.optimizer, gradients=to))  # type: ignore[arg-type]

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        mlp_loss(self.model, number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Parameters and state; all ranks call."""
        self.optimizer.wait_for_gathers()
        self.optimizer.consolidate_state_dict(to=None)
        return [param.detach().clone() for param in self.model.parameters()], self.optimizer.state_dict()

    def load(self, params: list[Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), params, strict=True):
                param.copy_(value)
        self.optimizer.load_state_dict(state)

    def leave(self) -> None:
        """Let go of the group in which a rank has died."""
        self.optimizer.zero_grad()  # of the pass that broke off
        self.model.detach()
        self.optimizer.detach()
        dist.destroy_process_group()

    def go_on(self) -> int:
        number = self.optimizer.rebind()
        self.model.rebind()
        self.register()
        return number


@dataclass
class Doom:
    """Counts calls of any function, Python's or C's, on the main thread, and kills this process at one.

    Attributes:
        last: the call before that one.
        calls: how many there were.
    """

    last: int = sys.maxsize
    calls: int = 0

    def __call__(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls > self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def begin_process(folder: Path, rank: int, size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    enter(folder, "all", rank, size)


def survive(folder: Path, rank: int, size: int, seed: int, result: Any) -> None:
    """Train while one rank after the other is killed, until one is left; sends the steps gone back to."""
    begin_process(folder, rank, size)
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    went = []
    with finely_cut():
        me = Trainer(kind, mirror=True)
        members, first = list(range(size)), 0
        known: dict[int, tuple[list[Tensor], dict[str, Any]]] = {}
        while len(members) > 1:
            doomed, iteration, share = chance.choice(members), chance.randrange(AHEAD - 2), chance.random()
            known, calls = run_without_fault(kind, first, known.get(first))
            doom = Doom(int(MIRRORED * share * calls)) if doomed == rank else None
            ended = run_until_killed(me, first, first + iteration, doom)
            members.remove(doomed)
            me.leave()
            enter(folder, f"without {doomed}", members.index(rank), len(members))
            back = me.go_on()
            about = (seed, kind, doomed, iteration, share)
            assert ended - 1 <= back <= ended + 1, (*about, ended, back)
            params, state = me.whole()
            assert_same_bits(params, known[back][0], about)
            assert_same_state(state, known[back][1])
            went.append(back)
            first = back
    dist.destroy_process_group()
    result.send((seed, rank, went))


def run_without_fault(
    kind: str, first: int, saved: Any
) -> tuple[dict[int, tuple[list[Tensor], dict[str, Any]]], int]:
    """Run without mirrors from what was resharded.

    Returns:
        Parameters and state by number of steps; and how many functions the last step called.
    """
    other, counter = Trainer(kind, mirror=False), Doom()
    if saved is not None:
        other.load(*saved)
    known = {first: saved if saved is not None else other.whole()}
    for number in range(first, first + AHEAD):
        counter.calls = 0
        sys.setprofile(counter)
        other.step(number)
        sys.setprofile(None)
        known[number + 1] = other.whole()
    other.model.detach()
    other.optimizer.detach()
    return known, counter.calls


def run_until_killed(me: Trainer, first: int, last: int, doom: Doom | None) -> int:
    """Train until this process is killed, or another; gives how many steps have ended.

    Args:
        me: trains.
        first: number of the first step.
        last: number of the step that this process begins, and does not survive for long.
        doom: kills this process; None on ranks that are left.
    """
    ended = first
    try:
        for number in range(first, first + 100):
            if number == last:
                sys.setprofile(doom)
            me.step(number)
            ended += 1
    except StalledError:
        return ended
    raise AssertionError("nobody was killed")


def run_sets(folder: Path, function: Callable[..., None], size: int, seed: int, left: int) -> list[Any]:
    """Run a function on some ranks, most of which are killed; gives what the others sent, by rank."""
    context = fork_context()
    ours, theirs = context.Pipe(duplex=False)
    folder.mkdir()
    processes = [
        context.Process(target=function, args=(folder, rank, size, seed, theirs)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    theirs.close()
    got = []
    try:
        while len(got) < left and ours.poll(LIMIT):
            got.append(ours.recv())
        for process in processes:
            process.join(LIMIT)
        codes = sorted(process.exitcode or 0 for process in processes)
        assert codes == [-signal.SIGKILL] * (size - left) + [0] * left, (size, seed, codes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        ours.close()
    return sorted(got)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fifty_kills_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    kills = 0
    for seed in range(10):
        for size in (3, 4):
            [(_, _, went)] = run_sets(tmp_path / f"{size} {seed}", survive, size, 10 * seed + size, 1)
            kills += len(went)
    assert kills == 50


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_are_left_go_back_to_a_step_that_all_of_them_have(tmp_path: Path, seed: int) -> None:
    [(_, _, went)] = run_sets(tmp_path / "set", survive, 3, seed, 1)
    assert len(went) == 2


def die_sending(folder: Path, rank: int, size: int, number: int, result: Any) -> None:
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
    got = run_sets(tmp_path / "set", die_sending, 3, number, 2)
    assert [rank for rank, *_ in got] == [0, 2]
    for _, steps_back, repeated in got:
        assert steps_back in (0, 1)  # as much as gloo still sent of what was started
        assert repeated in (0, 1)
