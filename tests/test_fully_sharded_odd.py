"""Odd models, and odd uses of models, that are fully sharded."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fully import Block, Tower, adamw, assert_alike, batch, both, fully, loss_of, train, trains_alike
from pool import Ranks, on_ranks
from zero_optim.ddp import DistributedDataParallel, fully_shard, fully_sharded, unsharded

CONTAINERS: list[Callable[[Any], nn.Module]] = [
    nn.ModuleList,
    lambda blocks: nn.Sequential(*blocks),
    lambda blocks: nn.ModuleDict({f"block{number}": block for number, block in enumerate(blocks)}),
]


@on_ranks(1)
def test_a_container_of_modules_stands_for_its_members() -> None:
    for container in CONTAINERS:
        model = Tower()
        model.blocks = container(model.blocks)
        wrapped, _ = fully(model, units=model.blocks)
        assert [unit.name for unit in wrapped.units.units[1:]] == [
            f"blocks.{name}" for name, _ in model.blocks.named_children()
        ]
    model = Tower()
    with pytest.raises(TypeError, match="got one, Block: put it in a list"):
        fully(model, units=model.blocks[0])


@on_ranks(1)
def test_a_module_that_is_never_called_itself_is_no_unit() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(ValueError, match=r"out_proj is never called itself: the MultiheadAttention"):
        fully(model, units=[model[0].out_proj])


@dataclasses.dataclass(frozen=True)
class Parts:
    out: Tensor
    weight: Tensor


class Returning(Block):
    """Returns views of its parameters too, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x), self.up.weight[:3])


class UsingViews(Tower):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Returning(form)]), nn.Identity()

    def __deepcopy__(self, memo: object) -> "UsingViews":
        return UsingViews(self.blocks[0].form)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.blocks[0](self.first(x))
        out, weight = (parts.out, parts.weight) if isinstance(parts, Parts) else parts.values()
        return out @ weight.t()


def in_dict(out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"out": out, "weight": weight}


@on_ranks(2)
def test_a_view_of_a_parameter_is_copied_out_of_any_container_or_refused() -> None:
    for form in (Parts, in_dict):
        trains_alike(UsingViews(form))
    wrapped, _ = fully(UsingViews(lambda *parts: MappingProxyType(in_dict(*parts))))
    with pytest.raises(RuntimeError, match=r"blocks.0 returned a view of a parameter in a mappingproxy"):
        loss_of(wrapped, 0)
    assert wrapped.units.nbytes_live() == 0


class Adding(Block):
    def forward(self, x: Tensor) -> None:
        x += super().forward(x.clone())


class InPlace(Tower):
    """Its units return nothing, and change their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adding(), Adding()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            block(x)
        return self.last(x)


@on_ranks(2)
def test_units_may_change_their_input_and_return_nothing() -> None:
    trains_alike(InPlace())


def loss_in_unsharded(wrapped: Any, step: int) -> Tensor:
    with nullcontext() if isinstance(wrapped, DistributedDataParallel) else unsharded(wrapped):
        return loss_of(wrapped, step) + 0.1 * wrapped.module.blocks[1].up.weight.square().sum()


@on_ranks(2)
def test_a_loss_computed_in_unsharded_is_backpropagated_outside() -> None:
    trains_alike(Tower(), loss_in_unsharded)


@on_ranks(2)
def test_inference_mode_leaves_nothing_behind() -> None:
    (whole, one), (sharded, other) = both(Tower())
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(sharded(batch(5)), whole(batch(5)))
        assert sharded.units.nbytes_live() == 0
        assert train(sharded, other) == train(whole, one)


class Interrupted(Tower):
    stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.stops:
            raise KeyboardInterrupt
        return self.last(self.blocks[1](x))


def is_interrupted(in_place: bool) -> None:
    whole, model = Interrupted(), Interrupted()
    wrapped = DistributedDataParallel(whole, find_unused_parameters=True)
    if in_place:
        called: Any = fully_shard(model, units=model.blocks, find_unused_parameters=True)
        optimizer, controller = adamw(model), fully_sharded(model)
    else:
        called, optimizer = fully(model, find_unused_parameters=True)
        controller = called
    for each, module, steps in ((wrapped, whole, adamw(wrapped)), (called, model, optimizer)):
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


@pytest.mark.parametrize("in_place", [False, True])
def test_it_goes_on_after_an_interrupt(ranks2: Ranks, in_place: bool) -> None:
    ranks2.run(is_interrupted, in_place)


class Tied(Tower):
    """The outermost module reads a unit's parameter by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return x @ self.blocks[0].up.weight.t()


@on_ranks(2)
def test_a_training_pass_that_reads_a_freed_parameter_raises() -> None:
    wrapped, _ = fully(Tied())
    with pytest.raises(RuntimeError, match=r"blocks.0 of shape \(24, 96\) is used by another module while"):
        loss_of(wrapped, 0)


class Generating(Tower):
    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            out = self(x)
            x = torch.cat([x[:, 3:], out], 1)
        for block in self.blocks:
            block(self.first(x))
        return x


@on_ranks(2)
def test_methods_call_the_model_in_a_loop() -> None:
    (whole, one), (sharded, other) = both(Generating())
    for _ in range(2):
        for how in (torch.no_grad, torch.enable_grad):
            with how():
                got = sharded.module.generate(batch(0), 3)
                assert torch.equal(got, whole.module.generate(batch(0), 3))
            if how is torch.no_grad:
                assert sharded.units.nbytes_live() == 0
        assert train(sharded, other) == train(whole, one)
