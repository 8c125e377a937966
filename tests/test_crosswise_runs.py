"""Ranks that have left out a call, or made one too many: all are told at once, whatever the timeout is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stalling import Outcome, about_to_stall, linear, outcomes, sharded
from waiting import wait_until
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import saving
from zero_optim.comm import verdicts, watchdog
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

LONG = 600.0  # seconds: a run that waits for it is ended before, and fails


def soon() -> None:
    """Have this rank ask early whether ranks wait crosswise."""
    verdicts._FIRST_QUESTION = 0.1  # type: ignore[attr-defined]
    watchdog._LONGEST_LOOK = 0.1  # type: ignore[attr-defined]
    about_to_stall()


def built(kind: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = linear()
    reader = model if kind == "lazy" else None
    optimizer = sharded(model, timeout=LONG, gather_lazily=reader, bucket_cap_mb=1e-4)
    if kind == "sharded":
        return ShardedDataParallel(model, optimizer, timeout=LONG), optimizer
    wrapper = DistributedDataParallel(model, timeout=LONG)
    if kind == "overlapped":
        wrapper.register_comm_hook(None, zero_step(optimizer, gradients="owners"))
    return wrapper, optimizer


def is_odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def train(kind: str, failure: str) -> str:
    """Train; the last rank leaves out a step of the third iteration, or a pass, or takes it twice."""
    soon()
    model, optimizer = built(kind)
    for number in range(6):
        strikes = is_odd() and number == 2
        if not (strikes and failure == "no pass"):
            model(torch.ones(2, 4)).sum().backward()
        for _ in range({"no step": 0, "two steps": 2}.get(failure, 1) if strikes else 1):
            optimizer.step()
    return "trained"


def check(ended: list[Outcome], *parts: str) -> None:
    """Every rank raised the same, which has some words."""
    for outcome in ended:
        assert str(outcome.said).startswith("StalledError: stalled: ranks have made different calls"), ended
        assert outcome.said == ended[0].said
        for part in parts:
            assert part in outcome.said, (part, ended)


@pytest.mark.parametrize("kind", ["plain", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_step_that_a_rank_left_out_is_named_long_before_the_timeout(kind: str) -> None:
    ended = outcomes(3, train, kind, "no step")
    check(ended, "no timeout can end; rank 2 has left out step() 3; rank", " in the gather of bucket ")
    check(
        ended,
        "; rank 2 waits in the reduction of bucket ",
        "; times of step(): 3 on ranks 0, 1 and 2 on rank 2",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "lazy", "sharded"])
def test_a_step_that_a_rank_takes_twice_is_named_long_before_the_timeout(kind: str) -> None:
    check(outcomes(2, train, kind, "two steps"), "rank 1 has called step() 4 times after 3 backward passes; ")


def test_a_backward_pass_that_a_rank_leaves_out_is_named_where_the_hook_steps() -> None:
    ended = outcomes(2, train, "overlapped", "no pass")
    check(
        ended,
        "rank 1 has called step() 3 times after 2 backward passes; ",
        "; rank 1 waits in the gather of ",
    )


def save_on_one_rank(folder: Path) -> str:
    soon()
    model, optimizer = built("plain")
    if is_odd():
        checkpoint.save(folder, model=model, optimizer=optimizer, timeout=LONG)
    model(torch.ones(2, 4)).sum().backward()
    return "saved"


def test_different_calls_that_meet_on_one_group_are_named_long_before_the_timeout(tmp_path: Path) -> None:
    ended = outcomes(2, save_on_one_rank, tmp_path / "saved")
    check(
        ended,
        "rank 0 waits in the reduction of bucket 0 (",
        "; rank 1 waits in the exchange of a checkpoint; ",
    )


def wait_beside(folder: Path) -> str:
    """The saver of rank 0 waits for that of rank 1, which computes; the other two threads the other way."""
    soon()
    model, optimizer = built("plain")
    asked, prove, write = folder / "asked", verdicts.Verdicts._prove, saving.write_tensors

    def prove_and_tell(*args: Any) -> None:
        prove(*args)
        asked.touch()

    def write_late(*args: Any, **options: Any) -> Any:
        wait_until(asked.exists)
        return write(*args, **options)

    verdicts.Verdicts._prove = prove_and_tell  # type: ignore[method-assign]
    if is_odd():
        saving.write_tensors = write_late
    pending = checkpoint.save_async(folder / "saved", model=model, optimizer=optimizer, timeout=LONG)
    if not is_odd():
        wait_until(asked.exists)
    model(torch.ones(2, 4)).sum().backward()
    pending.wait()
    return f"{len(RankGroup.of(None).works.log.verdicts)} verdicts"


def test_threads_that_wait_for_threads_that_compute_raise_no_alarm(tmp_path: Path) -> None:
    ended = outcomes(2, wait_beside, tmp_path)
    assert [outcome.said for outcome in ended] == ["0 verdicts"] * 2, ended


def consolidate_before_buckets_are_rebuilt() -> str:
    soon()
    model, optimizer = built("plain")
    for number in range(3):
        if is_odd() and number == 1:  # the others agree on the order of gradients in this forward pass
            optimizer.consolidate_state_dict()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return "trained"


def test_an_agreement_that_meets_the_rebuilding_of_buckets_is_named() -> None:
    check(
        outcomes(2, consolidate_before_buckets_are_rebuilt),
        "rank 0 waits in an agreement on the order of gradients",
    )
