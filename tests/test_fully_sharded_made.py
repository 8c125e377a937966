"""How a fully sharded model is made: unit by unit, before its optimizer, and from the meta device."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import (
    NARROW,
    Tower,
    adamw,
    assert_alike,
    assert_equal,
    batch,
    on_meta,
    state_of,
    train,
    trains_alike,
)
from pool import on_ranks
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
    fully_sharded,
    unsharded,
)


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ---------------------------------------------------------------------- an optimizer that comes later


@on_ranks(2)
def test_a_model_without_an_optimizer_takes_the_values_of_rank_0_evaluates_saves_and_loads() -> None:
    model = Tower()
    want = state_of(model)
    out = model(batch(0)).detach()
    for tensor in model.parameters():
        tensor.data.add_(dist.get_rank())
    model.register_buffer("shift", torch.full((2,), float(dist.get_rank())))
    want["shift"] = torch.zeros(2)
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    with torch.no_grad():
        assert torch.equal(wrapped(batch(0)), out)
    assert wrapped.units.nbytes_live() == 0
    assert_equal(state_of(wrapped), want)
    ones = {name: torch.ones_like(value) for name, value in want.items()}
    model.load_state_dict(ones)
    optimizer = adamw(wrapped)  # of the loaded values
    assert_equal(state_of(model), ones)
    train(wrapped, optimizer)


@on_ranks(2)
def test_an_empty_parameter_and_a_scalar_become_parts_of_units() -> None:
    model: Any = Tower()
    model.none, model.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
    model.register_forward_hook(lambda own, _, out: out * own.scale + own.none.sum())
    trains_alike(model)


# ---------------------------------------------------------------------- in place


class Written(Tower):
    """A model with a buffer, whose forward pass may call itself, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, *, again: bool = False, fails: bool = False) -> Tensor:
        if fails:
            raise ArithmeticError("on purpose")
        if again:
            return self(x)
        self.count += torch.distributed.get_rank() + 1
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("first", [True, False])
def test_a_module_that_is_sharded_in_place_trains_as_a_wrapped_one(first: bool) -> None:
    model = Written()
    whole = DistributedDataParallel(copy.deepcopy(model))
    one = adamw(whole)
    optimizer = adamw(model) if first else None
    names = [*model.state_dict()]
    assert fully_shard(model, optimizer, units=[*model.blocks], accumulate="local") is model
    assert type(model) is Written
    if optimizer is None:
        optimizer = adamw(model)
    assert train(model, optimizer) == train(whole, one)
    with pytest.raises(ArithmeticError):
        model(batch(0), fails=True)
    for own, steps, context in ((model, optimizer, fully_sharded(model)), (whole, one, whole)):
        steps.zero_grad()
        with context.no_sync():
            own(batch(8), again=True).square().mean().backward()
        own(batch(9)).square().mean().backward()
        steps.step()
    with torch.no_grad():
        assert torch.equal(model(batch(3)), whole(batch(3)))
    assert [*model.state_dict()] == names
    assert_alike(model, whole)
    assert torch.equal(model.count, whole.module.count)
    controller = fully_sharded(model)
    assert controller.units.nbytes_live() == 0
    assert controller.metrics()["passes"] > 0
    with pytest.raises(ValueError, match="fully sharded already"):
        fully_shard(model)
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="was not given to fully_shard"):
        fully_sharded(whole)


# ---------------------------------------------------------------------- models on the meta device


def heavy() -> nn.Sequential:
    """Four units, of 64 KiB each, and a module of the outermost unit."""
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)), nn.Linear(128, 8))


@on_ranks(2)
def test_no_rank_ever_holds_a_whole_model_that_comes_from_the_meta_device() -> None:
    model = on_meta(heavy)
    whole, unit = 4 * 128 * 128 * 4 + 129 * 8 * 4, 128 * 128 * 4
    seen: list[int] = []

    def init(module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]
        seen.append(storages([*model.parameters()]))

    wrapped = FullyShardedDataParallel(model, units=[*model[:4]], init=init)
    assert len(seen) == 5
    assert max(seen) <= unit + 64  # one unit alone, and what freed parameters show
    rows = [bucket.values.row.values for unit in wrapped.units.units for bucket in unit.buckets]
    assert wrapped.units.nbytes_live() == 0
    assert abs(storages(rows) - whole / 2) <= 129 * 8 * 2 + 64  # the outermost unit is not cut
    optimizer = adamw(wrapped)
    assert wrapped.units.nbytes_live() == 0
    wrapped(torch.ones(2, 128)).sum().backward()
    optimizer.step()


class Mixed(nn.Module):
    """Attention, whose own reset is private; buffers; tied weights; parameters of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.abs().long() % 8)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(0)) + self.shift)


@on_ranks(2)
def test_a_model_from_the_meta_device_has_the_bits_of_one_made_whole() -> None:
    torch.manual_seed(5)
    whole = DistributedDataParallel(Mixed())
    torch.manual_seed(5 + dist.get_rank())  # rank 0's count
    model = on_meta(Mixed)
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    assert model.head.weight is model.embed.weight
    assert_alike(model, whole)
    assert_equal(dict(model.named_buffers()), dict(whole.module.named_buffers()))
    assert train(wrapped, adamw(wrapped)) == train(whole, adamw(whole))
    assert_alike(model, whole)


# ---------------------------------------------------------------------- with a policy of dtypes


@on_ranks(2)
def test_what_is_loaded_before_the_optimizer_is_built_is_not_rounded() -> None:
    wrapped = FullyShardedDataParallel(Tower(width=48), mixed_precision=NARROW)
    state = {key: value + 0.001 for key, value in state_of(wrapped).items()}
    wrapped.module.load_state_dict(state)
    with unsharded(wrapped), torch.no_grad():
        wrapped.module.last.bias.fill_(0.5)
    state["last.bias"].fill_(0.5)
    with torch.no_grad():
        assert wrapped(batch(0)).isfinite().all()
    wrapped(batch(0)).sum().backward()  # for the owners until then
    wrapped.zero_grad()
    optimizer = adamw(wrapped)
    assert_equal(state_of(wrapped), state)
    train(wrapped, optimizer)


@on_ranks(2)
def test_a_frozen_model_without_optimizer_is_evaluated_and_passes_gradients_on() -> None:
    plain, model, student = (Tower().requires_grad_(False) for _ in range(3))
    student.requires_grad_(True)
    teacher = FullyShardedDataParallel(model, units=[*model.blocks])
    assert not any(param.requires_grad for param in teacher.parameters())
    x = batch(0)
    with torch.no_grad():
        assert torch.equal(teacher(x), plain(x))
    for _ in range(2):
        (student(x) - teacher(x)).square().mean().backward()
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for net, each in zip((teacher, plain), inputs, strict=True):
            net(each).square().mean().backward()
        assert torch.equal(*(each.grad for each in inputs))
        assert teacher.units.nbytes_live() == 0
    assert student.first.weight.grad is not None
    assert_equal(state_of(teacher), plain.state_dict())
