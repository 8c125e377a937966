"""With parameters on their owners alone, a loop trains as with whole ones."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fully import Tower, assert_alike, assert_equal, batch, both, fully, state_of, train
from pool import on_ranks
from training import LoRA
from zero_optim.ddp import FullyShardedDataParallel, unsharded


@on_ranks(2)
@pytest.mark.parametrize(("reshards", "kept"), [(True, 0), (1, 1)])
def test_only_what_is_used_or_next_is_there(reshards: bool | int, kept: int) -> None:
    """One unit is whole at a time, and the next one on its way; the outermost stays in training."""
    model = Tower()
    wrapped, optimizer = fully(model, reshard_after_forward=reshards)
    units = wrapped.units
    sizes = [sum(bucket.nbytes for bucket in unit.buckets) for unit in units.units]
    seen: list[tuple[str, list[bool]]] = []

    def look(where: str) -> None:
        live = [any(bucket.values.nbytes_live for bucket in unit.buckets) for unit in units.units]
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


class Blocks(Tower):
    """Blocks that begin with a frozen layer, which the backward pass reads last, called in some way."""

    def __init__(self, kind: str) -> None:
        super().__init__(depth=8, how="reentrant" if kind == "reentrant" else "")
        self.kind = kind
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up.requires_grad_(False)
            block.down = LoRA(block.down)
        for number in {"frozen": [1, 2, 5], "frozen first": [0, 1]}.get(kind, []):
            self.blocks[number].requires_grad_(False)
        self.first.requires_grad_(kind != "frozen first")

    def _two(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number + 1](self.blocks[number](x))

    def forward(self, x: Tensor) -> Tensor:
        if self.how:
            return super().forward(x)
        x = self.first(x)
        if self.kind == "pairs":
            for number in range(0, len(self.blocks), 2):
                x = checkpoint(self._two, number, x, use_reentrant=False)
            return self.last(x)
        for block in self.blocks:
            x = block(x=x) if self.kind == "by name" else block(x)
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
        live = (any(bucket.values.is_whole for bucket in unit.buckets) for unit in self._units.units[1:])
        self.most = max(self.most, sum(live))


@on_ranks(2)
def test_units_with_frozen_parameters_are_freed_when_their_inputs_have_gradients() -> None:
    for kind in (*("plain", "by name", "frozen", "frozen first"), *("twice", "reentrant", "pairs")):
        (whole, one), (fully, other) = both(Blocks(kind))
        live = Live(fully)
        assert train(fully, other, 2) == train(whole, one, 2), kind
        assert_alike(fully, whole)
        assert fully.units.nbytes_live() == 0
        assert live.most <= 2 + (kind == "pairs"), kind
