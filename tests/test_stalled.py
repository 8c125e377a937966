"""Ranks that stay away, are killed, stopped or slow: every other rank raises, and says who and why."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from stalling import (
    TIMEOUT,
    Outcome,
    about_to_stall,
    let_go_on,
    linear,
    outcomes,
    sharded,
    stay_away,
    with_gradients,
)
from zero_optim import RankMismatchError, StalledError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import host_lanes_beside
from zero_optim.comm.work_log import OVERLAPPED_STEP
from zero_optim.compat import private
from zero_optim.ddp import DistributedDataParallel
from zero_optim.health.diagnosis import Status, wait_for_each_other
from zero_optim.health.peers import Listener, Presence
from zero_optim.hooks import zero_step


def is_bad() -> bool:
    """Whether this is the rank that stalls: the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


def check(ended: list[Outcome], *parts: str) -> None:
    """Every rank but the last raised `StalledError` with some words, before the group's own timeout."""
    for outcome in ended[:-1]:
        assert str(outcome.said).startswith("StalledError: stalled"), ended
        for part in parts:
            assert part in outcome.said, (part, ended)


# ---------------------------------------------------------------------- who does not come


def step_without_one(late: float | None = None, timeout: float = TIMEOUT) -> str:
    model = with_gradients(linear())
    optimizer = sharded(model, timeout=timeout)
    optimizer.step()
    if is_bad() and late is None:
        stay_away()
    elif is_bad():
        about_to_stall()
        time.sleep(late or 0.0)
    optimizer.step()
    return "stepped"


def test_a_rank_that_does_not_call_step_is_named_with_what_it_did_last() -> None:
    ended = outcomes(3, step_without_one)
    check(
        ended, "rank 2 has not called step() (last seen: step() 1 ended ", "ranks 0, 1 wait in the gather of "
    )
    check(ended, "bucket 0 (1.bias, …)")
    assert ended[2].said == ended[0].said  # it comes too late


def test_a_rank_that_is_slow_but_in_time_is_waited_for() -> None:
    assert [outcome.said for outcome in outcomes(2, step_without_one, 0.5, 100 * TIMEOUT)] == ["stepped"] * 2


def wrapped(kind: str) -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    model = linear()
    optimizer = sharded(model)
    if kind == "PyTorch's":
        theirs = torch.nn.parallel.DistributedDataParallel(model)
        theirs.register_comm_hook(None, zero_step(optimizer))
        return theirs, optimizer
    wrapper = DistributedDataParallel(model, timeout=TIMEOUT)
    if kind == "hooked":
        wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapper, optimizer


def backward_without_one(kind: str, *, is_killed: bool = False) -> str:
    model, optimizer = wrapped(kind)
    for number in range(2):
        loss = model(torch.ones(2, 4)).sum()
        if is_bad() and number:
            os.kill(os.getpid(), signal.SIGKILL) if is_killed else stay_away()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return "trained"


@pytest.mark.parametrize(
    ("kind", "is_killed", "told"),
    [
        ("averaged", False, "rank 1 has not begun its backward pass (last seen: forward pass 2 ended "),
        ("PyTorch's", False, ""),  # whose hook steps: the timeout is that of the optimizer
        ("hooked", True, "rank 1 has ended"),
    ],
)
def test_a_rank_that_skips_its_backward_pass_or_was_killed_is_named(
    kind: str, is_killed: bool, told: str
) -> None:
    ended = outcomes(2, partial(backward_without_one, kind, is_killed=is_killed))
    check(ended, told, "rank 0 waits in the reduction")


def call_alone(call: str, path: Path) -> str:
    """All ranks but the last make a call that all of them have to make."""
    model = with_gradients(linear())
    optimizer = sharded(model)
    optimizer.step()
    if is_bad():
        stay_away()
    elif call == "save":
        checkpoint.save(path, timeout=TIMEOUT, model=model, optimizer=optimizer)
    else:
        optimizer.consolidate_state_dict()
    return "called"


SAID = {
    "consolidate_state_dict": ["rank 1 has not called consolidate_state_dict() (last seen: step() 1 ended "],
    "save": ["rank 1 has not called checkpoint.save()", "rank 0 waits in the exchange of a checkpoint"],
}


@pytest.mark.parametrize("call", SAID)
def test_a_rank_that_does_not_make_a_call_of_all_ranks_is_named(tmp_path: Path, call: str) -> None:
    ended = outcomes(2, call_alone, call, tmp_path / "saved")
    check(ended, *SAID[call])
    assert ended[1].said == "called"


def leave_addresses_of_former_processes() -> None:
    """Have the store be as torchrun hands it to processes that it starts again."""
    former = Listener("127.0.0.1")
    former.close()
    private.get_default_store().set(f"zero_optim/watchdog/{dist.get_rank()}", json.dumps(former.address))
    dist.barrier()


def construct_alone_after_a_restart() -> str:
    leave_addresses_of_former_processes()
    stay_away() if is_bad() else sharded(linear())
    return "called"


def test_a_rank_that_has_built_nothing_since_a_restart_is_not_taken_for_ended() -> None:
    ended = outcomes(2, construct_alone_after_a_restart)
    check(ended, "rank 1 has built no optimizer and no DDP of zero_optim")


# ---------------------------------------------------------------------- whose process does not run


def step_while_one_gets(signum: int) -> str:
    model = with_gradients(linear())
    optimizer = sharded(model)
    optimizer.step()
    if is_bad():
        about_to_stall()
        os.kill(os.getpid(), signum)
    optimizer.step()
    return "stepped"


def test_a_killed_rank_is_named_at_once() -> None:
    ended = outcomes(3, step_while_one_gets, signal.SIGKILL)
    check(ended, "rank 2 has ended, or has dropped its optimizers: nothing listens at its address any more")
    assert ended[2].exitcode == -signal.SIGKILL


def step_while_a_survivor_waits_for_another() -> str:
    """Rank 0 is killed. Rank 1 waits for it, and sends nothing; rank 2 waits for rank 1, on another lane.

    Nothing here has a timeout of its own.
    """
    optimizer, rank = sharded(with_gradients(linear()), timeout=None), dist.get_rank()
    lanes = host_lanes_beside(RankGroup.of(None))
    optimizer.step()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = rank - 1
    try:
        for work in lanes.groups[awaited].broadcast_rows([(awaited, torch.ones(4))]):
            work.wait()
    except StalledError:
        if rank == 1:
            stay_away()  # with its groups
        raise
    return "received"


@pytest.mark.on_sockets("it uses several lanes, and there is one")
def test_a_rank_that_waits_for_a_survivor_hears_of_the_killed_rank() -> None:
    ended = outcomes(3, step_while_a_survivor_waits_for_another)
    for outcome in ended[1:]:
        assert str(outcome.said).startswith("StalledError: stalled: rank 0 has ended"), ended


def test_a_stopped_rank_is_named_and_raises_the_same_when_it_goes_on() -> None:
    ended = outcomes(2, step_while_one_gets, signal.SIGSTOP, meanwhile=let_go_on)
    check(ended, "rank 1 does not answer: its process is stopped, its host too busy, or the link to it cut")
    assert ended[1].said == ended[0].said


def forward_without_the_first() -> str:
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), timeout=TIMEOUT
    )
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        stay_away()
    model(torch.ones(2, 4))
    return "passed"


def test_who_waits_for_buffers_names_the_rank_that_sends_none() -> None:
    ended = outcomes(2, forward_without_the_first)
    assert str(ended[1].said).startswith("StalledError: stalled"), ended
    assert "rank 0 has not begun its forward pass" in ended[1].said, ended
    assert "rank 1 waits in the broadcast of the model's buffers" in ended[1].said, ended


def construct_while_one_ends() -> str:
    if is_bad():
        os._exit(3)
    sharded(linear())
    return "built"


def test_a_rank_that_ends_before_it_constructs_ends_the_construction_of_the_others() -> None:
    check(outcomes(3, construct_while_one_ends), "rank 2 has ")


# ---------------------------------------------------------------------- what else can be asked for


def explain_on_one_rank() -> str:
    optimizer = sharded(with_gradients(linear()), timeout=(None, 1.0))
    about_to_stall()
    if not is_bad():
        optimizer.explain()
    optimizer.step()
    return "stepped"


def test_ranks_that_wait_for_each_other_wait_as_long_as_the_option_says_and_not_as_the_group() -> None:
    check(
        outcomes(2, explain_on_one_rank),
        "not for the same",
        "times of explain(): 1 on rank 0 and 0 on rank 1",
    )


def test_ranks_that_may_go_on_do_not_wait_for_each_other() -> None:
    def waits_in(text: str, stuck: float, *doing: tuple[str, int]) -> Status:
        return Status((text,), doing, {}, stuck=stuck)

    one, other = waits_in("an exchange between all ranks", 60.0), waits_in("the gather", 61.0)
    assert wait_for_each_other({0: one, 1: other}, 60.0)
    for free in (one, waits_in("the gather", 3.0), waits_in("the gather", 61.0, (OVERLAPPED_STEP, 1))):
        assert not wait_for_each_other({0: one, 1: free}, 60.0)
    for free in (Presence.SILENT, Status((), (), {})):
        assert not wait_for_each_other({0: one, 1: other, 2: free}, 60.0)


def step_or_exit() -> str:
    optimizer = sharded(with_gradients(linear()), on_stall="exit")
    if is_bad():
        stay_away()
    optimizer.step()
    return "stepped"


def test_with_on_stall_exit_the_processes_end_with_a_code_of_their_own() -> None:
    assert [outcome.exitcode for outcome in outcomes(2, step_or_exit)] == [75, 75]


def refuse() -> list[str]:
    told = []
    mine = 2.0 + dist.get_rank()
    wrong: tuple[dict[str, Any], ...] = (
        {"timeout": 0},
        {"timeout": (None, None)},
        {"timeout": (None, 1, 2)},
        {"on_stall": "wait"},
        {"timeout": mine},
        {"timeout": (None, mine)},
    )
    for options in wrong:
        for build in (sharded, DistributedDataParallel):
            try:
                build(linear(), **options)
            except ValueError as error:
                told.append(str(error))
            except RankMismatchError as error:
                told.append(type(error).__name__)
    return told


def test_wrong_or_different_limits_are_refused_on_every_rank() -> None:
    for outcome in outcomes(2, refuse):
        number = ["expected timeout to be seconds above 0, None, or a pair of these, got "] * 6
        word = ['expected on_stall to be "raise" or "exit", got '] * 2
        expected = [*number, *word, *["RankMismatchError"] * 4]
        assert len(outcome.said) == len(expected)
        for said, part in zip(outcome.said, expected, strict=True):
            assert part in said
