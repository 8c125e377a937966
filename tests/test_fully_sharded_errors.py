"""Fully sharded models go on after errors and interrupts."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fully import Tower, adamw, assert_alike, batch, fully, train
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel, fully_shard, fully_sharded
from zero_optim.shard import module_calls


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.fails:
            raise ArithmeticError("on purpose")
        return x


@on_ranks(2)
def test_it_goes_on_after_a_forward_pass_that_raised() -> None:
    model = nn.Sequential(nn.Linear(8, 24), Failing(), nn.Linear(24, 3))
    wrapped, optimizer = fully(model, units=[model[1]])
    model[1].fails = True
    with pytest.raises(ArithmeticError):
        wrapped(batch(0))
    assert wrapped.units.nbytes_live() == 0
    model[1].fails = False
    with torch.no_grad():
        before = wrapped(batch(0))
    assert wrapped.units.nbytes_live() == 0
    assert torch.equal(wrapped(batch(0)), before)
    assert torch.equal(model(batch(0)), before)
    assert not model[1](torch.ones(1, 24)).isnan().any()
    train(wrapped, optimizer)


def refuse(*_: object) -> None:
    raise ArithmeticError("on purpose")


@on_ranks(2)
def test_it_goes_on_after_a_hook_that_raised_in_front_of_a_unit_or_of_the_model() -> None:
    wrapped, optimizer = fully()
    want = train(*fully())
    model = wrapped.module
    for module in (model.blocks[1], model.blocks[1].up, model):
        handle = module.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(ArithmeticError):
            wrapped(batch(0))
        handle.remove()
        assert wrapped.units.nbytes_live() == 0
    assert train(wrapped, optimizer) == want
    assert wrapped.units.nbytes_live() == 0


@on_ranks(2)
def test_a_model_that_is_called_where_an_exception_is_handled_trains_as_ever() -> None:
    (wrapped, optimizer), want = fully(), train(*fully())
    try:
        refuse()
    except ArithmeticError:
        got = train(wrapped, optimizer)
    assert got == want


class Interrupted(Tower):
    stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.stops:
            raise KeyboardInterrupt
        return self.last(self.blocks[1](x))


@on_ranks(2)
@pytest.mark.parametrize("in_place", [False, True])
def test_it_goes_on_after_an_interrupt(in_place: bool) -> None:
    whole, model = Interrupted(), Interrupted()
    wrapped = DistributedDataParallel(whole, find_unused_parameters=True)
    if in_place:
        called: Any = fully_shard(model, units=model.blocks, find_unused_parameters=True)
        optimizer, controller = adamw(model), fully_sharded(model)
    else:
        called, optimizer = fully(model, find_unused_parameters=True)
        controller = called
    for each, module, steps in ((wrapped, whole, adamw(wrapped)), (called, model, optimizer)):
        with mock.patch.object(module_calls, "_num_calls", side_effect=AssertionError("no call in a call")):
            train(each, steps, 1)
        module.stops = True
        with pytest.raises(KeyboardInterrupt):
            each(batch(3))
        module.stops = False
        train(each, steps, 2)
    assert_alike(model, whole)
    assert controller.units.nbytes_live() == 0
    with torch.no_grad():
        called(batch(1))
    assert controller.units.nbytes_live() == 0
