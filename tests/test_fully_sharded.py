"""With parameters on their owners alone, a loop trains as with whole ones."""

import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fully import (
    Tower,
    assert_alike,
    assert_equal,
    batch,
    both,
    fully,
    state_of,
    train,
)
from pool import on_ranks
from zero_optim.ddp import FullyShardedDataParallel, unsharded


# The table of `test_parity` has models that keep no unit.
@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "reshards"), [("", False), ("reentrant", 2), ("not reentrant", False), ("not reentrant", 1)]
)
def test_units_that_stay_have_the_bits_of_whole_parameters(how: str, reshards: bool | int) -> None:
    (whole, one), (sharded, other) = both(Tower(how=how), of_fully={"reshard_after_forward": reshards})
    for _ in range(2):
        assert all(param.isnan().all() for param in sharded.parameters())
        assert train(sharded, other, most=0.5) == train(whole, one, most=0.5)
    assert_alike(sharded, whole)
    assert sharded.units.nbytes_live() == 0


@on_ranks(2)
@pytest.mark.parametrize(("reshards", "kept"), [(True, 0), (False, 3), (1, 1)])
def test_only_what_is_used_or_next_is_there(reshards: bool | int, kept: int) -> None:
    """One unit is whole at a time, and the next one on its way; the outermost stays in training."""
    model = Tower()
    wrapped, optimizer = fully(model, reshard_after_forward=reshards)
    units = wrapped.units
    sizes = [sum(bucket.nbytes for bucket in unit.buckets) for unit in units.units]
    seen: list[tuple[str, list[bool]]] = []

    def look(where: str) -> None:
        live = [any(bucket.nbytes_live for bucket in unit.buckets) for unit in units.units]
        assert units.nbytes_live() == sum(size for size, is_live in zip(sizes, live, strict=True) if is_live)
        seen.append((where, live))

    def look_both_ways(number: int, _: nn.Module, __: object, out: Tensor) -> None:
        look(f"in {number}")
        out.register_hook(lambda _: look(f"back in {number}"))

    for number, block in enumerate(model.blocks):
        block.up.register_forward_hook(partial(look_both_ways, number))
    for step in range(3):
        seen.clear()
        loss = wrapped(batch(step)).square().mean()
        look("between")
        loss.backward()
        look("after")
        optimizer.step()
        optimizer.zero_grad()
    root, whole, empty = True, True, False
    forward = {
        "in 0": [root, whole, whole, empty],
        "in 1": [root, kept > 2, whole, whole],
        "in 2": [root, kept > 2, kept > 1, whole],
        "between": [root, kept > 2, kept > 1, kept > 0],
        "back in 2": [root, kept > 2, True, whole],
        "back in 1": [root, True, whole, empty],
        "back in 0": [root, whole, empty, empty],
        "after": [empty] * 4,
    }
    assert {where for where, _ in seen} == set(forward), "somebody looked everywhere"
    for where, live in seen:
        assert live == forward[where], (where, live, forward[where])


@on_ranks(2)
def test_parameters_are_read_and_written_where_they_are_whole() -> None:
    model = Tower()
    before = state_of(model)
    wrapped, optimizer = fully(model)
    weight = model.blocks[0].up.weight
    assert weight.shape == (96, 24)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.add_(1)
    assert_equal(state_of(wrapped), before)
    assert wrapped.units.nbytes_live() == 0
    with unsharded(model.blocks[0]), torch.no_grad():
        weight.fill_(torch.distributed.get_rank() + 1)
        assert model.first.weight.isnan().all()
    owners = optimizer.pieces()[weight]
    with unsharded(wrapped):
        for piece in owners:
            assert (weight[piece.start : piece.stop] == piece.owner + 1).all()
    wrapped.load_state_dict({f"module.{name}": 2 * tensor for name, tensor in before.items()})
    assert weight.isnan().all()
    assert_equal(state_of(model), {name: 2 * tensor for name, tensor in before.items()})


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


# ---------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """LoRA: a frozen layer, and two small ones beside it that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def trained(model: nn.Module) -> Iterator[Tensor]:
    return (param for param in model.parameters() if param.requires_grad)


@on_ranks(2)
@pytest.mark.parametrize(("inside", "how"), [(True, "not reentrant"), (False, "")])
def test_adapters_train_alike(inside: bool, how: str) -> None:
    """The optimizer has the frozen base or not; it stays as it was."""
    model = Tower(how=how).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    (whole, one), (sharded, other) = both(model, owned=nn.Module.parameters if inside else trained)
    assert train(sharded, other) == train(whole, one)
    assert sharded.module.blocks[0].up.base.weight.isnan().all() == inside
    assert_alike(sharded, whole)
    assert sharded.units.nbytes_live() == 0
    for block, kept in zip(whole.module.blocks, model.blocks, strict=True):
        assert torch.equal(block.up.base.weight, kept.up.base.weight)
        assert not torch.equal(block.up.up.weight, kept.up.up.weight)


@on_ranks(2)
def test_what_is_left_outside_units_may_be_gathered_lazily() -> None:
    (whole, one), (sharded, other) = both(Tower())
    other.gather_lazily(sharded)
    assert train(sharded, other) == train(whole, one)
    assert_alike(sharded, whole)


# ---------------------- units with frozen parameters


WIDTH, NUM_BLOCKS = 24, 8


class HalfFrozen(nn.Module):
    """Begins with a frozen layer, which the backward pass reads last; ends with one that is adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapted = Adapted(nn.Linear(WIDTH, WIDTH))
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.adapted(self.last(torch.tanh(self.first(x))))


class Blocks(nn.Module):
    """Blocks that are called in some way."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(HalfFrozen() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 3)
        frozen = {"frozen": [1, 2, 5], "frozen first": [0, 1]}.get(kind, [])
        for number in frozen:
            self.blocks[number].requires_grad_(False)
        if kind == "frozen first":
            self.first.requires_grad_(False)

    def _two(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number + 1](self.blocks[number](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "pairs":
            for number in range(0, NUM_BLOCKS, 2):
                x = checkpoint(self._two, number, x, use_reentrant=False)
        for block in () if self.kind == "pairs" else self.blocks:
            if self.kind in ("reentrant", "checkpointed"):
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            elif self.kind == "by name":
                x = block(x=x, scale=0.5)
            elif self.kind == "in place":
                x = block(x.clone().mul_(1.0))
            else:
                x = block(x)
        if self.kind == "twice":
            x = self.blocks[0](x)
        return self.last(x)


class Live:
    """Counts the blocks that are whole, when a gradient has come.

    Attributes:
        most: at once, in blocks.
    """

    def __init__(self, wrapped: FullyShardedDataParallel) -> None:
        self.most = 0
        self._units = weakref.proxy(wrapped.units)  # such hooks keep for ever what they refer to
        for param in wrapped.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        live = (any(bucket.is_whole for bucket in unit.buckets) for unit in self._units.units[1:])
        self.most = max(self.most, sum(live))


KINDS = [
    "plain",
    "by name",
    "in place",
    "frozen",
    "frozen first",
    "twice",
    "checkpointed",
    "reentrant",
    "pairs",
]


@on_ranks(2)
def test_units_with_frozen_parameters_are_freed_when_their_inputs_have_gradients() -> None:
    for kind in KINDS:
        (whole, one), (fully, other) = both(Blocks(kind))
        live = Live(fully)
        assert train(fully, other, 2) == train(whole, one, 2), kind
        assert_alike(fully, whole)
        assert fully.units.nbytes_live() == 0
        assert live.most <= 2 + (kind == "pairs"), kind
