"""Models that the table of `test_parity` does not have train fully sharded as they do whole, bit for bit."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pool import Ranks, on_ranks
from test_fully_sharded import Block, Tower, batch
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)

Loss = Callable[[nn.Module, int], Tensor]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).square().mean()


def blocks_of(model: Any) -> list[nn.Module]:
    return [*model.blocks]


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    with unsharded(model):
        for (name, param), want in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(param, want), name


def both(
    model: nn.Module,
    units: Callable[[Any], list[nn.Module]] = blocks_of,
    optimizer_class: Any = torch.optim.AdamW,
    owned: Callable[[nn.Module], Iterator[Tensor]] = nn.Module.parameters,
    accumulate: str = "",
    of_optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> list[tuple[Any, ZeroRedundancyOptimizer]]:
    """Two wrappers of copies of a model, whole and fully sharded, each with its optimizer."""
    pair = []
    for fully in (False, True):
        own: Any = copy.deepcopy(model)
        optimizer = ZeroRedundancyOptimizer(owned(own), optimizer_class, lr=1e-2, **(of_optimizer or {}))
        wrapped: Any
        if fully:
            more: Any = {"accumulate": accumulate} if accumulate else {}
            wrapped = FullyShardedDataParallel(own, optimizer, units=units(own), **more, **options)
        elif accumulate == "owner" or torch.distributed.get_world_size() > 2:  # the order of sums
            wrapped = ShardedDataParallel(own, optimizer, accumulate=accumulate or "owner", **options)
        else:
            wrapped = DistributedDataParallel(own, **options)
        pair.append((wrapped, optimizer))
    return pair


def train(wrapped: Any, optimizer: Any, loss_of: Loss, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_alike(model: nn.Module, loss_of: Loss = loss_of, **options: Any) -> None:
    (whole, one), (fully, other) = both(model, **options)
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    assert_alike(fully.module, whole.module)
    assert fully.units.nbytes_live() == 0


class Kinds(Tower):
    """A tower that uses its blocks in some way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        first, second, _ = self.blocks
        if kind == "tied":
            second.up.weight = first.up.weight
        if kind == "positions":
            first.place = Positions()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        first, second, third = self.blocks
        if self.kind == "positions":
            x = x + first.place(4)
        return self.last(third(second(first(x))))


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 24))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


def nested(model: Any) -> list[nn.Module]:
    return [*model.blocks, *(block.up for block in model.blocks), model.first]


def with_places(model: Any) -> list[nn.Module]:
    return [*model.blocks, model.blocks[0].place]


CASES: dict[str, dict[str, Any]] = {
    "tied nested": {"units": nested},
    "nested": {"units": nested},
    "positions": {"units": with_places},
}


@on_ranks(2)
@pytest.mark.parametrize("kind", CASES)
def test_blocks_are_used_in_any_way(kind: str) -> None:
    trains_alike(Kinds(kind.removesuffix(" nested")), **CASES[kind])


def trained(model: nn.Module) -> Iterator[Tensor]:
    return (param for param in model.parameters() if param.requires_grad)


@on_ranks(2)
@pytest.mark.parametrize("inside", [True, False])
def test_frozen_parameters_are_sharded_if_the_optimizer_has_them(inside: bool) -> None:
    model = Tower()
    for param in [*model.blocks[0].parameters(), model.blocks[1].up.weight, model.first.bias]:
        param.requires_grad_(False)

    (whole, one), (fully, other) = both(model, owned=nn.Module.parameters if inside else trained)
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    assert fully.module.blocks[0].up.weight.isnan().all() == inside
    assert_alike(fully.module, whole.module)
    assert fully.units.nbytes_live() == 0


class Adapted(nn.Module):
    """LoRA: a frozen layer, and two small ones beside it that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def trains_adapters(inside: bool, how: str = "") -> None:
    """The optimizer has the frozen base or not; it stays as it was."""
    model = Tower(how=how).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    (whole, one), (fully, other) = both(model, owned=nn.Module.parameters if inside else trained)
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    assert_alike(fully.module, whole.module)
    for block, kept in zip(whole.module.blocks, model.blocks, strict=True):
        assert torch.equal(block.up.base.weight, kept.up.base.weight)
        assert not torch.equal(block.up.up.weight, kept.up.up.weight)


@pytest.mark.parametrize(("inside", "how"), [(True, ""), (True, "not reentrant"), (False, "")])
def test_adapters_of_a_frozen_base_train_alike(ranks2: Ranks, inside: bool, how: str) -> None:
    ranks2.run(trains_adapters, inside, how)


class Hidden:
    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Wrapping(Block):
    """Gives its output in another form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__(24)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x))


class Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(8, 24)
        forms: list[Callable[[Tensor], Any]] = [lambda x: {"out": (x, None)}, lambda x: [3, (x,)], Hidden]
        self.blocks = nn.ModuleList([Wrapping(form) for form in forms])

    def __deepcopy__(self, memo: object) -> "Forms":
        return Forms()

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.blocks
        x = one(self.first(x))["out"][0]
        hidden: Tensor = three(two(x)[1][0]).inside
        return hidden


@on_ranks(2)
def test_modules_return_anything() -> None:
    trains_alike(Forms())


@on_ranks(2)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_steps_whole_matrices() -> None:
    model = nn.Sequential(*(nn.Linear(8 * (n + 1), 8 * (n + 2), bias=False) for n in range(4)))
    trains_alike(model, units=lambda model: [*model][1:], optimizer_class=torch.optim.Muon)


@on_ranks(2)
def test_what_is_left_outside_units_may_be_gathered_lazily() -> None:
    (whole, one), (fully, other) = both(Tower())
    other.gather_lazily(fully)
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    assert_alike(fully.module, whole.module)
