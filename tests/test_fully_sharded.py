"""With parameters on their owners alone, a loop trains as with whole ones."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, unsharded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks between a first and a last layer; ``how`` is the kind of activation checkpointing."""

    def __init__(self, width: int = 24, depth: int = 3, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return self.last(x)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    return torch.randn(4, 8, generator=generator)


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def trains_alike(how: str, reshards: bool | int) -> None:
    model = Tower(how=how)
    whole = DistributedDataParallel(copy.deepcopy(model))
    one = adamw(whole)
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(
        model, optimizer, units=[*model.blocks], reshard_after_forward=reshards
    )
    assert all(param.isnan().all() for param in model.parameters())
    assert train(wrapped, optimizer) == train(whole, one)
    assert all(param.isnan().all() for param in model.parameters())
    with unsharded(model):
        for param, want in zip(model.parameters(), whole.module.parameters(), strict=True):
            assert torch.equal(param, want)
    assert wrapped.units.nbytes_live() == 0


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("reshards", [True, False, 2])
def test_training_gives_the_bits_of_whole_parameters(ranks2: Ranks, how: str, reshards: bool | int) -> None:
    ranks2.run(trains_alike, how, reshards)


@on_ranks(2)
@pytest.mark.parametrize(("reshards", "kept"), [(True, 0), (False, 3), (1, 1)])
def test_only_what_is_used_or_next_is_there(reshards: bool | int, kept: int) -> None:
    """One unit is whole at a time, and the next one on its way; the outermost stays in training."""
    model = Tower()
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(
        model, optimizer, units=[*model.blocks], reshard_after_forward=reshards
    )
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
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    weight = model.blocks[0].up.weight
    assert weight.shape == (96, 24)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.add_(1)
    for name, tensor in wrapped.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
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
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, 2 * before[name]), name
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(wrapped)


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
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[model[1]])
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


# torch.compile warns of its own innards here and there.
@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_units_train_alike() -> None:
    torch._dynamo.reset()
    model = Tower()
    whole = DistributedDataParallel(copy.deepcopy(model))
    one = adamw(whole)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    assert train(wrapped, optimizer) == train(whole, one)
    with unsharded(model):
        for param, want in zip(model.parameters(), whole.module.parameters(), strict=True):
            assert torch.equal(param, want)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"cuts": False}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("optimizer_class", ["AdamW", "SGD", "Adafactor"])
def test_any_class_steps_its_rows(options: dict[str, object], optimizer_class: str) -> None:
    model = Tower()
    whole = DistributedDataParallel(copy.deepcopy(model))
    build = getattr(torch.optim, optimizer_class)
    one = ZeroRedundancyOptimizer(whole.parameters(), build, lr=1e-2, **options)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), build, lr=1e-2, **options)
    wrapped = FullyShardedDataParallel(model, optimizer)
    assert len(wrapped.units.units) > 1
    assert train(wrapped, optimizer) == train(whole, one)
    for each in (optimizer, one):
        each.consolidate_state_dict(to=None)
    states = [each.state_dict()["state"] for each in (optimizer, one)]
    assert states[0].keys() == states[1].keys()
    for own, other in zip(*(state.values() for state in states), strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(own[key]), torch.as_tensor(other[key])) for key in other)
    if "ema_decay" in options:
        with optimizer.averaged_weights(), one.averaged_weights(), unsharded(model):
            for param, want in zip(model.parameters(), whole.module.parameters(), strict=True):
                assert torch.equal(param, want)
