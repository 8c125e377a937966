"""Ranks that left out a call, or made one too many, wait for different works: all say who waits where."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stalling import TIMEOUT, about_to_stall, linear, outcomes, sharded
from test_stalled import is_bad
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step


def built(kind: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    about_to_stall()
    model = linear()
    optimizer = sharded(model, bucket_cap_mb=1e-4)
    if kind == "sharded":
        return ShardedDataParallel(model, optimizer, timeout=TIMEOUT), optimizer
    wrapper = DistributedDataParallel(model, timeout=TIMEOUT)
    if kind == "overlapped":
        wrapper.register_comm_hook(None, zero_step(optimizer))
    return wrapper, optimizer


def run_backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def train(kind: str, failure: str) -> str:
    """Train; the last rank leaves out a step of the third iteration, or a pass, or takes it twice."""
    model, optimizer = built(kind)
    for number in range(6):
        strikes = is_bad() and number == 2
        if not (strikes and failure == "no pass"):
            run_backward(model)
        for _ in range({"no step": 0, "two steps": 2}.get(failure, 1) if strikes else 1):
            optimizer.step()
        optimizer.zero_grad()
    return "trained"


def check(size: int, function: Callable[..., str], *args: object, said: tuple[str, ...]) -> None:
    """Every rank raises the same, which has some words."""
    ended = outcomes(size, function, *args)
    for outcome in ended:
        assert str(outcome.said).startswith("StalledError: stalled for "), ended
        assert outcome.said == ended[0].said
        for part in ("every rank waits, but not for the same; ", *said):
            assert part in outcome.said, (part, ended)


def test_a_step_that_a_rank_left_out_is_named() -> None:
    counts = "; times of step(): 3 on ranks 0, 1 and 2 on rank 2"
    waits = ("; rank 2 waits in the reduction of bucket ", " in the gather of bucket ")
    check(3, train, "plain", "no step", said=("; rank 2 has left out step() 3; rank", *waits, counts))


@pytest.mark.slow
def test_a_step_that_a_rank_takes_twice_is_named() -> None:
    said = ("rank 1 has called step() 4 times after 3 backward passes; ",)
    check(2, train, "plain", "two steps", said=said)


def test_a_backward_pass_that_a_rank_leaves_out_is_named_where_the_hook_steps() -> None:
    said = ("rank 1 has called step() 3 times after 2 backward passes; ", "; rank 1 waits in the gather of ")
    check(2, train, "overlapped", "no pass", said=said)


def save_on_one_rank(folder: Path) -> str:
    model, optimizer = built("plain")
    if is_bad():
        checkpoint.save(folder, model=model, optimizer=optimizer, timeout=TIMEOUT)
    run_backward(model)
    return "saved"


def test_different_calls_that_meet_on_one_group_are_named(tmp_path: Path) -> None:
    said = ("rank 0 waits in the reduction of bucket 0 (", "; rank 1 waits in the exchange of a checkpoint; ")
    check(2, save_on_one_rank, tmp_path / "saved", said=said)


def accumulate_on_each_rank_as_often_as_it_likes() -> str:
    model, optimizer = built("sharded")
    for _ in range(1 + dist.get_rank()):
        with model.no_sync():
            run_backward(model)
    run_backward(model)
    optimizer.step()
    return "trained"


def test_other_numbers_of_passes_that_owners_add_up_name_the_option_that_allows_them() -> None:
    call = 'times of no_sync(), under which accumulate="owner" reduces every pass, and "local" none'
    said = (f"{call}: 1 on rank 0 and 2 on rank 1",)
    check(2, accumulate_on_each_rank_as_often_as_it_likes, said=said)


def accumulate_inside_join() -> str:
    about_to_stall()
    torch.manual_seed(0)
    model = TorchDDP(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, timeout=TIMEOUT)
    with Join([model, optimizer]):
        for _ in range(1 + dist.get_rank()):
            with model.no_sync():
                run_backward(model)
            run_backward(model)
            optimizer.step()
    return "trained"


def test_accumulation_inside_join_under_the_wrapper_of_pytorch_is_named() -> None:
    ended = outcomes(2, accumulate_inside_join)
    assert "no_sync()" in str(ended[0].said), ended
