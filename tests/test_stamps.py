"""Ranks tell each other in the gathers of a step what they do differently: all raise, and say who it was."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from breaking import Breaks, BreaksAnywhere
from fake_streams import without_thread
from pool import on_ranks
from training import assert_equal_on_all_ranks, params_of
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.hooks import zero_step


def make(cls: Any = torch.optim.SGD, **options: Any) -> ZeroRedundancyOptimizer:
    params = [nn.Parameter(torch.full(shape, 1.0)) for shape in [(8, 3), (5,), (16, 2), (7,)]]
    return ZeroRedundancyOptimizer(params, cls, **{"lr": 0.125, **options})


def step(optimizer: ZeroRedundancyOptimizer) -> None:
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()


def check_equal(optimizer: ZeroRedundancyOptimizer) -> None:
    assert_equal_on_all_ranks(params_of(optimizer))


def owned_by(num_owners: int, optimizer: ZeroRedundancyOptimizer) -> ZeroRedundancyOptimizer:
    owners = {piece.owner for pieces in optimizer.pieces().values() for piece in pieces}
    assert len(owners) == num_owners
    return optimizer


def of_params(cls: Any, *params: nn.Parameter, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, cls, lr=0.125, **options)


def cut(cls: Any) -> ZeroRedundancyOptimizer:
    """The rows of all ranks lie in one parameter."""
    return owned_by(dist.get_world_size(), of_params(cls, nn.Parameter(torch.ones(64, 1024))))


def single(cls: Any, **options: Any) -> ZeroRedundancyOptimizer:
    """All ranks but one own nothing."""
    return owned_by(1, of_params(cls, nn.Parameter(torch.ones(3)), **options))


BUILDERS: dict[str, Callable[[Any], ZeroRedundancyOptimizer]] = {
    "views": make,
    "packed": partial(make, parameters_as_bucket_view=False),
    "cut": cut,
    "owned by one": single,
    "owned by one, packed": partial(single, parameters_as_bucket_view=False),
}
of_builders = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@on_ranks(2)
@of_builders
def test_a_step_that_raises_on_one_rank_raises_on_all(build: Callable[[Any], Any]) -> None:
    optimizer = build(BreaksAnywhere)
    step(optimizer)
    for rank in range(2):
        optimizer.optim.breaks = here = dist.get_rank() == rank
        with pytest.raises(ArithmeticError if here else RemoteRankError) as caught:
            step(optimizer)
        optimizer.optim.breaks = False
        told = f"rank {rank} failed with ArithmeticError: no such root. Ranks on which"
        assert here or str(caught.value).startswith(told)
        check_equal(optimizer)
    step(optimizer)
    check_equal(optimizer)


@on_ranks(2)
@of_builders
def test_a_rate_that_differs_on_one_rank_raises_on_all(build: Callable[[Any], Any]) -> None:
    optimizer = build(torch.optim.SGD)
    for _ in range(2):
        step(optimizer)
    for rank in range(dist.get_world_size()):
        optimizer.param_groups[0]["lr"] = 0.25 if dist.get_rank() == rank else 0.5
        for _ in range(2):
            with pytest.raises(RankMismatchError, match=rf"lr of group 0: .*\brank {rank} has 0.25"):
                step(optimizer)
            check_equal(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    step(optimizer)
    check_equal(optimizer)


@on_ranks(2)
def test_a_rate_that_is_changed_in_place_on_one_rank_raises_on_all() -> None:
    optimizer = make(lr=torch.tensor(0.25))
    step(optimizer)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"].mul_(2)
    with pytest.raises(RankMismatchError, match=r"rank 0 has 0.5; rank 1 has 0.25"):
        step(optimizer)


@on_ranks(2)
def test_options_that_are_a_rank_s_own_may_differ() -> None:
    optimizer = make(own_options=["lr"])
    optimizer.param_groups[0]["lr"] = 0.5 + dist.get_rank()
    step(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5 * dist.get_rank()
    with pytest.raises(RankMismatchError, match=r"momentum of group 0: rank 0 has 0; rank 1 has 0.5\."):
        step(optimizer)


class NoNumber(float):
    """Cannot be turned into a plain number."""

    def __float__(self) -> float:
        raise RuntimeError("no number")


@on_ranks(2)
def test_no_option_leaves_a_rank_waiting() -> None:
    optimizer = make()
    optimizer.param_groups[0].update({7: 1.0, "odd": NoNumber(1)})
    step(optimizer)
    optimizer.param_groups[0]["odd"] = 1.0
    step(optimizer)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 2.0
    with pytest.raises(RankMismatchError, match=r"lr of group 0: rank 0 has 0.125; rank 1 has 2"):
        step(optimizer)


@pytest.mark.on_sockets("it counts what goes through the backend")
@on_ranks(2)
def test_options_are_compared_by_value() -> None:
    optimizer = make(torch.optim.Adam, betas=(0.9, 0.99))
    one = dist.get_rank() == 1
    optimizer.metrics()
    step(optimizer)
    num_gathers = optimizer.metrics()["collectives/total"]
    assert num_gathers == 3, "a step sends a row of each rank and gathers the stamps, nothing else"
    group = optimizer.param_groups[0]
    for values in (
        {"lr": 1 if one else 1.0, "amsgrad": 0 if one else False},
        {"lr": torch.tensor(0.5) if one else 0.5, "betas": [0.5, 0.25] if one else (0.5, 0.25)},
        {"lr": 0.1 + (1e-16 if one else 0.0)},
    ):
        group.update(values)
        step(optimizer)
    group["lr"] = 0.3 * (1 + 1e-9 * one)
    step(optimizer)
    assert optimizer.metrics()["collectives/agree"] == 0


class Moves(torch.optim.SGD):
    """Has a method that changes nothing, and gathers like a step."""

    def settle(self) -> None:
        pass


@on_ranks(2)
def test_another_call_in_the_place_of_a_step_is_named() -> None:
    optimizer = make(Moves)
    step(optimizer)
    match = (
        r"different calls of the optimizer: rank 0 in step\(\), call 2 there; rank 1 in settle\(\), call 2"
    )
    with pytest.raises(RankMismatchError, match=match):
        step(optimizer) if dist.get_rank() == 0 else optimizer.settle()
    step(optimizer)


@on_ranks(2)
def test_a_group_that_is_missing_on_one_rank_is_named() -> None:
    optimizer = make()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
    step(optimizer)
    if dist.get_rank() == 1:
        del optimizer.param_groups[1]
    with pytest.raises(ValueError, match="has 2 parameter groups, but param_groups lists 1"):
        step(optimizer)


def lazy() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, ZeroRedundancyOptimizer(model.parameters(), Breaks, lr=0.125, gather_lazily=model)


def check_late(*, is_lazy: bool) -> None:
    """Ranks hear of a step in the next one, or in the forward pass before it."""
    model, optimizer = lazy() if is_lazy else (nn.Identity(), make(Breaks))
    step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5 + dist.get_rank()
    step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RankMismatchError, match=r"rank 0 has 0.5; rank 1 has 1.5"):
        step(optimizer)
    optimizer.optim.breaks = True
    fails = dist.get_rank() == 1
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        step(optimizer)
    optimizer.optim.breaks = False
    heard = pytest.raises(RemoteRankError, match=r"rank 1 failed with ArithmeticError in step\(\)")
    with nullcontext() if fails else heard:
        model(torch.ones(1, 4)) if is_lazy else step(optimizer)
    model(torch.ones(1, 4))
    step(optimizer)
    optimizer.wait_for_gathers()
    check_equal(optimizer)


@on_ranks(2)
def test_a_step_that_gathers_lazily_is_told_in_the_next_forward_pass_or_step() -> None:
    check_late(is_lazy=True)


@on_ranks(2)
def test_on_an_accelerator_stamps_are_looked_at_one_step_later() -> None:
    without_thread(partial(check_late, is_lazy=False))


def overlapped() -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Breaks, lr=0.125)
    model.register_comm_hook(None, zero_step(optimizer, ddp=model))
    return model, optimizer


def iterate(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_a_rate_that_differs_in_an_overlapped_step_is_named_by_step() -> None:
    model, optimizer = overlapped()
    iterate(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5 + dist.get_rank()
    model(torch.ones(1, 4)).sum().backward()
    match = r"in backward\(\): lr of group 0: rank 0 has 0.5; rank 1 has 1.5"
    with pytest.raises(RankMismatchError, match=match):
        optimizer.step()
    check_equal(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    iterate(model, optimizer)


@on_ranks(2)
def test_ranks_that_ran_out_of_inputs_are_lent_the_options() -> None:
    """Rank 1 runs out of inputs first; a scheduler runs where there are inputs."""
    optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.metrics()
    with Join([optimizer]):
        for _ in range(4 - 2 * dist.get_rank()):
            step(optimizer)
            scheduler.step()
    with pytest.raises(RankMismatchError, match="lr of group 0"):
        step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with Join([optimizer]):
        for _ in range(2 + dist.get_rank()):
            step(optimizer)
    step(optimizer)
    check_equal(optimizer)
