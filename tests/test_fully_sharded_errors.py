"""What a fully sharded model refuses, and how it goes on after errors."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from fully import Tower, adamw, assert_alike, assert_equal, both, fully, loss_of, state_of, train
from pool import on_ranks
from stalling import TIMEOUT, outcomes
from zero_optim import ReductionError, RemoteRankError
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    full_state_dict,
    unsharded,
)


class Breaking(torch.autograd.Function):
    """Raises in its backward pass where it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Breaking.fails:
            raise ArithmeticError("on purpose")
        return grad


class Broken(Tower):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = second(first(self.first(x)))
        return self.last(third(Breaking.apply(x)))


@on_ranks(2)
def test_it_goes_on_after_a_backward_pass_that_broke_off() -> None:
    (whole, one), (sharded, other) = both(Broken())
    for wrapped, optimizer in ((whole, one), (sharded, other)):
        Breaking.fails = True
        with pytest.raises(ArithmeticError):
            loss_of(wrapped, 5).backward()
        with pytest.raises(ReductionError, match="every rank: a backward pass ended with an exception"):
            loss_of(wrapped, 6)
        Breaking.fails = False
        train(wrapped, optimizer)
    assert_alike(sharded, whole)
    assert sharded.units.nbytes_live() == 0


def raises_on_one() -> str:
    model = Tower()
    wrapped, _ = fully(model, adamw(model, timeout=TIMEOUT))
    if dist.get_rank() == 1:

        def fail(*_: object) -> None:
            raise ArithmeticError("on purpose")

        model.blocks[1].register_forward_hook(fail)
    try:
        loss_of(wrapped, 0).backward()
    except ArithmeticError:
        return "failed"
    return "trained"


@pytest.mark.slow
def test_other_ranks_hear_of_a_rank_that_stopped_in_its_forward_pass() -> None:
    waiting, failed = outcomes(2, raises_on_one)
    assert failed.said == "failed"
    assert str(waiting.said).startswith("StalledError"), waiting
    assert "rank 0 waits in the gather" in str(waiting.said)


@on_ranks(2)
def test_wrong_arguments_change_nothing() -> None:
    model = Tower()
    optimizer = adamw(model)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "expected mixed_precision to be", {"mixed_precision": object()}),
        (TypeError, "takes no bucket_cap_mb", {"bucket_cap_mb": 1}),
        (TypeError, "expected units to be", {"units": 3}),
        (TypeError, "expected units to be modules", {"units": ["blocks.0"]}),
        (ValueError, "no module of the model", {"units": [nn.Linear(2, 2)]}),
        (ValueError, "never called itself", {"units": [model.blocks]}),
        (TypeError, "expected reshard_after_forward", {"reshard_after_forward": "yes"}),
        (ValueError, "expected accumulate", {"accumulate": "both"}),
        (Exception, "units", {"units": "auto" if dist.get_rank() else 3}),
    ]
    before = state_of(model)
    for kind, words, options in wrong:
        with pytest.raises(kind, match=words):
            FullyShardedDataParallel(model, **{"optimizer": optimizer, **options})
    assert_equal(state_of(model), before)
    with pytest.raises(ValueError, match="no parameter of this Tower is sharded"), unsharded(model):
        pass
    train(FullyShardedDataParallel(model, optimizer), optimizer)


@on_ranks(2)
def test_what_would_need_parameters_that_are_not_there_is_refused() -> None:
    model = Tower()
    wrapped, optimizer = fully(model)
    for build in (FullyShardedDataParallel, ShardedDataParallel):
        with pytest.raises((ValueError, RuntimeError), match="fully sharded"):
            build(model, optimizer)
    for module in (model, wrapped):
        with pytest.raises(ValueError, match="the model is fully sharded already"):
            DistributedDataParallel(module)
    other = nn.Linear(2, 2)
    optimizer.add_param_group({"params": [*other.parameters()]})
    with pytest.raises(RuntimeError, match="fully sharded model already"):
        FullyShardedDataParallel(other, optimizer)
    for call in (wrapped.detach, optimizer.detach):
        with pytest.raises(RuntimeError, match="cannot be detached"):
            call()
    with pytest.raises(RuntimeError, match="no part in Join"), Join([wrapped]):
        pass
    with pytest.raises(RuntimeError, match="no comm hook"):
        wrapped.register_comm_hook(None, lambda _, bucket: bucket)
    for thing in (wrapped, model, optimizer):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            copy.deepcopy(thing)
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        pickle.dumps(model)
    with pytest.raises(RuntimeError, match="create_graph=True is not possible"):
        torch.autograd.grad(loss_of(wrapped, 0), [model.first.weight], create_graph=True)
    part, message = model.blocks[0].up, "this Linear lies inside a unit of a fully sharded model"
    with pytest.raises(ValueError, match=message), unsharded(part):
        pass
    with pytest.raises(ValueError, match=message):
        full_state_dict(part)


WRONG: dict[str, Callable[[Any, bool], object]] = {
    "load_state_dict": lambda model, bad: model.load_state_dict(3 if bad else {}),
    "full_state_dict": lambda model, bad: full_state_dict(3 if bad else model),  # type: ignore[arg-type]
    "full_state_dict of another": lambda model, bad: full_state_dict(Tower() if bad else model),
    "full_state_dict on none": lambda model, bad: full_state_dict(model, ranks=3 if bad else (0,)),  # type: ignore[arg-type]
    "load_local_state_dict": lambda model, bad: model.load_local_state_dict(
        3 if bad else model.local_state_dict()
    ),
}


@on_ranks(2)
def test_a_state_dict_that_one_rank_asks_for_wrongly_raises_on_all_and_changes_nothing() -> None:
    wrapped, _ = fully()
    loss_of(wrapped, 0).backward()  # before that, calls agree on conversions first
    before = full_state_dict(wrapped, ranks=(0, 1))
    assert before is not None
    for call in WRONG.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            call(wrapped, dist.get_rank() == 1)
        assert dist.get_rank() or "rank 1: " in str(caught.value)
        after = full_state_dict(wrapped, ranks=(0, 1))
        assert after is not None
        assert_equal(after, before)
        loss_of(wrapped, 0).backward()


@pytest.mark.not_late("a timeout ends waits of gloo, not of a group in Python")
@on_ranks(2, forked=True)
def test_unsharded_of_no_model_on_one_rank_is_told_after_the_timeout() -> None:
    model = Tower()
    wrapped, _ = fully(model, adamw(model, timeout=TIMEOUT), timeout=TIMEOUT)
    loss_of(wrapped, 0).backward()
    if dist.get_rank():
        with pytest.raises(TypeError, match="expected a fully sharded model, or a module of one, got int"):
            unsharded(3).__enter__()  # type: ignore[arg-type]
    else:
        with pytest.raises(RemoteRankError, match="every rank waits, but not for the same; "):
            unsharded(wrapped).__enter__()
