"""How a fully sharded model is made: unit by unit, before its optimizer, and from the meta device."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import (
    Tower,
    adamw,
    assert_alike,
    assert_equal,
    batch,
    loss_of,
    on_meta,
    state_of,
    train,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
    fully_sharded,
    unsharded,
)
from zero_optim.shard.row_bucket import RowBucket


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ---------------------------------------------------------------------- an optimizer that comes later


@on_ranks(2)
@pytest.mark.parametrize("is_planned_alike", [True, False])
def test_an_optimizer_that_is_built_later_gives_the_bits_of_one_built_before(is_planned_alike: bool) -> None:
    """Rows stay where they are if the owners are the same."""
    model = Tower(how="reentrant")
    whole = DistributedDataParallel(copy.deepcopy(model))
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])

    def rows() -> list[int]:
        return [bucket.row.data_ptr() for unit in wrapped.units.units for bucket in unit.buckets]

    before = rows()
    one, optimizer = (adamw(model, cuts=is_planned_alike) for model in (whole, wrapped))
    assert (rows() == before) == is_planned_alike
    assert train(wrapped, optimizer) == train(whole, one)
    assert_alike(model, whole)
    assert wrapped.units.nbytes_live() == 0


class Odd(nn.Module):
    """Memory formats, several dtypes, a frozen parameter, a scalar and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4, dtype=torch.float64)])
        self.blocks.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.fixed = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = first(x.view(1, 4, 2, 4)).mean(-1).squeeze(0).t() @ self.fixed
        return (second(x.double()).float() @ self.turned.t()) * self.scale * self.one + self.none.sum()


@on_ranks(2)
@pytest.mark.parametrize("first", [True, False])
def test_parameters_of_any_form_become_units(first: bool) -> None:
    model = Odd()
    whole = DistributedDataParallel(copy.deepcopy(model))
    one = adamw(whole, ema_decay=0.5)
    optimizer = adamw(model, ema_decay=0.5) if first else None
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    optimizer = optimizer or adamw(wrapped, ema_decay=0.5)
    turned = model.turned
    assert train(wrapped, optimizer) == train(whole, one)
    assert_alike(model, whole)
    with unsharded(model):
        assert turned.stride() == whole.module.turned.stride()
        assert model.blocks[0].weight.is_contiguous(memory_format=torch.channels_last)
    with optimizer.averaged_weights(), one.averaged_weights():
        assert_alike(model, whole)


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
def test_a_later_optimizer_that_cannot_be_is_refused_and_changes_nothing() -> None:
    model = Tower()
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    with pytest.raises(ValueError, match="lacks 2 trainable parameters"):
        ZeroRedundancyOptimizer([*model.parameters()][2:], torch.optim.AdamW)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("a fully sharded model takes none", {"overlap_with_ddp": True}),
        ("Invalid beta", {"betas": (2.0, 2.0)}),  # in the class itself, when rows were moved
        ("another process group", {"process_group": dist.new_group()}),
    ]
    for words, options in wrong:
        with pytest.raises(ValueError, match=words):
            adamw(wrapped, **options)
    with unsharded(model), pytest.raises(RuntimeError, match="somebody to read or write"):
        adamw(wrapped)
    loss_of(wrapped, 0).backward()
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        adamw(wrapped)
    wrapped.zero_grad()
    whole = DistributedDataParallel(Tower())
    whole.module.load_state_dict(model.state_dict())
    optimizer = adamw(wrapped)
    with pytest.raises(ValueError, match="has an optimizer already"):
        adamw(wrapped)
    assert train(wrapped, optimizer) == train(whole, adamw(whole))


PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"foreach": True}),
]


@on_ranks(1)
def test_an_optimizer_that_is_not_sharded_cannot_step_a_fully_sharded_model() -> None:
    model = Tower()
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    loss_of(wrapped, 0).backward()
    for kind, options in PLAIN:
        plain = kind(wrapped.parameters(), **options)
        with pytest.raises(RuntimeError, match=f"build ZeroRedundancyOptimizer.*{kind.__name__}"):
            plain.step()
    wrapped.zero_grad()
    train(wrapped, adamw(wrapped))
    whole = Tower()
    loss_of(whole, 0).backward()
    torch.optim.AdamW(whole.parameters()).step()  # others step as ever


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


# ---------------------------------------------------------------------- memory


class Heavy(nn.Module):
    """Four units, of 64 KiB each, and a module of the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(4)])
        self.last = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@on_ranks(2)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_while_a_model_is_wrapped_a_rank_needs_one_unit_more_than_the_model(has_optimizer: bool) -> None:
    """Count what is alive whenever rows were copied: the model, and the rows of what was released."""
    model: Any = Heavy()
    params = [*model.parameters()]
    nbytes, unit = sum(param.nbytes for param in params), 128 * 128 * 4
    seen: list[int] = []
    rows: dict[int, int] = {}
    let_go = RowBucket.let_go

    def counted(bucket: RowBucket, only: Tensor | None = None) -> None:
        if only is not None:
            rows[id(bucket)] = bucket.row.untyped_storage().nbytes()
            seen.append(storages(params) + sum(rows.values()) + bucket.nbytes_live)
        let_go(bucket, only)

    optimizer = None
    if has_optimizer:  # without views each parameter has memory of its own
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, parameters_as_bucket_view=False)
    RowBucket.let_go = counted  # type: ignore[method-assign]
    try:
        FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    finally:
        RowBucket.let_go = let_go  # type: ignore[method-assign]
    assert len(seen) == len(params)
    rooms = 5 * 64  # for stamps, in the rows of five buckets
    assert max(seen) <= nbytes + unit + rooms, (max(seen), nbytes)


# ---------------------------------------------------------------------- models on the meta device


@on_ranks(2)
def test_no_rank_ever_holds_a_whole_model_that_comes_from_the_meta_device() -> None:
    model = on_meta(Heavy)
    whole, unit = 4 * 128 * 128 * 4 + 129 * 8 * 4, 128 * 128 * 4
    seen: list[int] = []

    def init(module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]
        seen.append(storages([*model.parameters()]))

    wrapped = FullyShardedDataParallel(model, units=[*model.blocks], init=init)
    assert len(seen) == 5
    assert max(seen) <= unit + 64  # one unit alone, and what freed parameters show
    rows = [bucket.row for unit in wrapped.units.units for bucket in unit.buckets]
    assert wrapped.units.nbytes_live() == 0
    rooms = 5 * 64  # for stamps
    assert abs(storages(rows) - whole / 2) <= 129 * 8 * 2 + rooms  # the outermost unit is not cut
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


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))


@on_ranks(2)
def test_a_model_from_the_meta_device_that_nobody_can_initialize_is_refused() -> None:
    with pytest.raises(ValueError, match="the outermost module, a Bare, is on the meta device and has no"):
        FullyShardedDataParallel(on_meta(Bare))
    with pytest.raises(ValueError, match="weight has no values after init of its module, a Bare"):
        FullyShardedDataParallel(
            on_meta(Bare), init=lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None
        )
    with pytest.raises(ValueError, match="nothing in this one is"):
        FullyShardedDataParallel(Bare(), init=nn.Linear.reset_parameters)
    half = Bare()
    half.inner.to("meta")
    half.inner.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer([half.weight], torch.optim.AdamW)
    with pytest.raises(ValueError, match="wrap it without an optimizer, then build"):
        FullyShardedDataParallel(half, optimizer)


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
        assert inputs[0].grad is not None
        assert torch.equal(*(each.grad for each in inputs))
        assert teacher.units.nbytes_live() == 0
    assert student.first.weight.grad is not None
    assert_equal(state_of(teacher), plain.state_dict())
