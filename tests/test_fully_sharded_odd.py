"""Odd models, and odd uses of models, that are fully sharded."""

from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fully import (
    Block,
    Tower,
    adamw,
    assert_equal,
    batch,
    both,
    fully,
    loss_of,
    state_of,
    train,
    trains_alike,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, fully_shard, unsharded
from zero_optim.ddp.full.in_use import units_of
from zero_optim.shard.places import is_freed

KEPT: dict[str, Tensor] = {}  # what modules below keep outside of themselves


def tower(*blocks: nn.Module) -> Any:
    """A tower whose first blocks are replaced."""
    model = Tower()
    for number, block in enumerate(blocks):
        model.blocks[number] = block
    return model


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 24))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


class Looking(Block):
    """Reads its parameters in the middle of its backward pass."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(self.norm(x))
        hidden.register_hook(self.look)
        return x + self.down(torch.relu(hidden))

    def look(self, _: Tensor) -> None:
        with nullcontext() if units_of(self) is None else unsharded(self, writes=False):
            assert not any(map(is_freed, self.parameters()))


class Placed(Block):
    """Reads positions."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Positions()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.place(4))


def tied() -> Any:
    model = Tower()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def nested(model: Any) -> list[nn.Module]:
    return [*model.blocks, *(block.up for block in model.blocks), model.first]


class Returning(Block):
    """Returns its output, or also a view of a parameter, in some form."""

    def __init__(self, form: Callable[..., Any], *, weight: bool = False) -> None:
        super().__init__()
        self.form, self.weight = form, weight

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return self.form(out, self.up.weight[:3]) if self.weight else self.form(out)


class Hidden:
    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Forms(Tower):
    """Its blocks return anything."""

    def __init__(self) -> None:
        super().__init__()
        forms: list[Callable[[Tensor], Any]] = [lambda x: {"out": (x, None)}, lambda x: [3, (x,)], Hidden]
        self.blocks = nn.ModuleList(map(Returning, forms))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.blocks
        x = one(self.first(x))["out"][0]
        return self.last(three(two(x)[1][0]).inside)


def in_dict(out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"out": out, "weight": weight}


class UsingViews(Tower):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Returning(form, weight=True)]), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.blocks[0](self.first(x))
        return parts["out"] @ parts["weight"].t()


class Adding(Block):
    """Changes its input, and returns nothing."""

    def forward(self, x: Tensor) -> None:
        x += super().forward(x.clone())


class InPlace(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adding(), Adding()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            block(x)
        return self.last(x)


class Detaching(Block):
    """Reads a weight in the backward pass when all gradients of the unit have come."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(nn.functional.linear(x, self.down.weight.detach()[:, :24]))
        return super().forward(x)


class Keeping(Block):
    """Keeps a tensor aside: in an attribute, or in a dict that is no module's."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.gate = nn.Linear(24, 2, bias=False)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        aux = self.gate(torch.tanh(self.down(torch.relu(self.up(x))))).square().mean()
        if self.where == "attribute":
            self.aux = aux
        else:
            KEPT["aux"] = aux
        return out


def routed(where: str = "elsewhere") -> Any:
    return tower(Block(), Keeping(where))


def loss_in_unsharded(wrapped: Any, step: int) -> Tensor:
    """Computed there, and backpropagated outside."""
    with nullcontext() if isinstance(wrapped, DistributedDataParallel) else unsharded(wrapped):
        return loss_of(wrapped, step) + 0.1 * wrapped.module.blocks[1].up.weight.square().sum()


def kept(model: Any, step: int) -> Tensor:
    """With what a unit kept aside."""
    out = model(batch(step))
    aux: Tensor = model.module.blocks[1].aux
    return out.square().mean() + (KEPT["aux"] if aux.grad_fn is None else aux)


def kept_alone(model: Any, step: int) -> Tensor:
    model(batch(step))
    return KEPT["aux"] + 2


def twice_by_what_is_kept(model: Any, step: int) -> Tensor:
    """What was kept has a backward pass of its own."""
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    return KEPT["aux"] + 0 * loss.detach()


def with_hooks_of_others(model: nn.Module, step: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return loss_of(model, step)


class Odd(NamedTuple):
    make: Callable[[], nn.Module] = Tower
    loss: Callable[[Any, int], Tensor] = loss_of
    options: Any = MappingProxyType({})


UNUSED = {"find_unused_parameters": True}
ODD = {
    "a tied weight, nested units": Odd(tied, options={"units": nested}),
    "nested units": Odd(options={"units": nested}),
    "a unit returns a view of its parameter": Odd(
        lambda: tower(Placed()), options={"units": lambda model: [*model.blocks, model.blocks[0].place]}
    ),
    "modules return anything": Odd(Forms),
    "views in a dict": Odd(lambda: UsingViews(in_dict)),
    "units change their input and return nothing": Odd(InPlace),
    "a weight is read after all gradients": Odd(lambda: tower(Detaching(), Detaching())),
    "a unit is read in its backward pass": Odd(
        lambda: tower(Looking(), Looking()), options={"of_fully": {"guards_reads": False}}
    ),
    "a loss computed in unsharded": Odd(loss=loss_in_unsharded),
    "kept in an attribute": Odd(lambda: routed("attribute"), kept),
    "kept, the whole loss": Odd(routed, kept_alone, UNUSED),
    "kept, with a pass of its own": Odd(
        routed, twice_by_what_is_kept, {**UNUSED, "of_fully": {"accumulate": "owner"}}
    ),
    "hooks of others": Odd(loss=with_hooks_of_others),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ODD)
def test_odd_models_and_losses_have_the_bits_of_whole_parameters(name: str) -> None:
    make, loss, options = ODD[name]
    trains_alike(make(), loss, **options)
    KEPT.clear()


@on_ranks(2)
def test_inference_and_methods_that_call_the_model_leave_nothing_behind() -> None:
    (whole, one), (sharded, other) = both(Tower())

    def generate(model: Any, x: Tensor) -> Tensor:
        """Call the model in a loop, and its blocks by themselves."""
        for _ in range(3):
            x = torch.cat([x[:, 3:], model(x)], 1)
        for block in model.blocks:
            block(model.first(x))
        return x

    for how in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with how():
            assert torch.equal(sharded(batch(5)), whole(batch(5)))
            assert torch.equal(generate(sharded.module, batch(0)), generate(whole.module, batch(0)))
        if how is not torch.enable_grad:
            assert sharded.units.nbytes_live() == 0
        assert train(sharded, other) == train(whole, one)


class ReadingUnits(Tower):
    """The outermost module reads a unit's parameter by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return x @ self.blocks[0].up.weight.t()


@on_ranks(2)
def test_views_that_cannot_be_copied_and_reads_of_freed_parameters_raise() -> None:
    wrapped, _ = fully(UsingViews(lambda *parts: MappingProxyType(in_dict(*parts))))
    with pytest.raises(RuntimeError, match=r"blocks.0 returned a view of a parameter in a mappingproxy"):
        loss_of(wrapped, 0)
    assert wrapped.units.nbytes_live() == 0
    wrapped, _ = fully(ReadingUnits())
    with pytest.raises(RuntimeError, match=r"blocks.0 of shape \(24, 96\) is used by another module while"):
        loss_of(wrapped, 0)


class Overwriting(Block):
    """Writes to what autograd saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.up(x))
        out = super().forward(x) + y.sum()
        y.detach().add_(1)
        return out


@on_ranks(2)
def test_writes_to_what_autograd_saved_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fully(tower(Overwriting()))[0](batch(0)).sum().backward()
    wrapped, optimizer = fully(routed(), **UNUSED)
    kept(wrapped, 0).backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*A step or a load counts"):
        KEPT["aux"].backward()
    train(wrapped, optimizer, loss_of=kept)
    KEPT.clear()


@on_ranks(2)
@pytest.mark.parametrize("how", ["reentrant", "other"])
def test_a_unit_with_another_inside_may_be_computed_again(how: str) -> None:
    results = []
    for model in (Tower(), Tower(how=how)):
        units = [module for block in model.blocks for module in (block, block.up)]
        optimizer = adamw(model)
        wrapped = fully_shard(model, optimizer, units=units)
        results.append((train(wrapped, optimizer), state_of(wrapped)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


class Momentum(Tower):
    """Has a frozen copy of its blocks, which follows them in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.ModuleList([Block(24) for _ in range(3)]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.blocks.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return super().forward(x)


@on_ranks(2)
def test_a_copy_that_follows_freed_weights_in_a_forward_pass_is_refused() -> None:
    for units, raises in (("blocks", True), ("none", False)):
        model = Momentum()
        optimizer: Any = ZeroRedundancyOptimizer(
            [param for param in model.parameters() if param.requires_grad], torch.optim.SGD, lr=0.1
        )
        fully_shard(model, optimizer, units=[*model.blocks] if units == "blocks" else [])
        with (
            pytest.raises(RuntimeError, match="wrote NaN into frozen parameters") if raises else nullcontext()
        ):
            loss_of(model, 0).backward()
