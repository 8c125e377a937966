"""A fully sharded model that is converted after wrapping trains as one that was converted before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pool import Ranks
from test_fully_sharded import Tower, batch
from test_fully_sharded_models import train
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import (
    FullyShardedDataParallel,
    Offload,
    PrecisionPolicy,
    full_state_dict,
    fully_shard,
    sharded_state_dict,
    unsharded,
)
from zero_optim.errors import RankMismatchError
from zero_optim.step.leaves import MASTER

Convert = Callable[[Any], object]


class Any16(Tower):
    """A tower that takes inputs of any dtype, with buffers, a tied parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)
        self.whole = nn.Parameter(torch.randn(8), requires_grad=False)  # in no optimizer that came first

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.shift.dtype) + self.shift) * self.fixed.to(self.shift.dtype)
        x = self.first((x * self.whole.to(x.dtype)).to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        return self.last(x.to(self.last.weight.dtype))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).float().square().mean()


def convert_part(model: Any) -> None:
    model.blocks[2].bfloat16()
    model.last.double()


def convert_twice(model: Any) -> None:
    model.to(torch.bfloat16)
    model.float()  # which stays rounded
    model.last.double()


CONVERSIONS: dict[str, Convert] = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": nn.Module.half,
    "double": nn.Module.double,
    "part": convert_part,
    "twice": convert_twice,
}


def optimizer_over(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    params = [param for name, param in model.named_parameters() if not name.endswith("whole")]
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2, eps=1e-2, **options)


def made(
    order: str, convert: Convert, *, before: bool, of_optimizer: dict[str, Any], **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Wrap a model; convert it before that, or behind."""
    model = Any16()
    if before:
        convert(model)
    optimizer = optimizer_over(model, **of_optimizer) if order == "first" else None
    if order == "in place":
        wrapped: Any = fully_shard(model, units=[*model.blocks], **options)
    else:
        wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks], **options)
    if not before and order != "built between":
        convert(model if order != "later" else _Within(wrapped))
    if optimizer is None:
        optimizer = optimizer_over(wrapped, **of_optimizer)
    if not before and order == "built between":
        convert(model)
    return wrapped, optimizer


class _Within:
    """A wrapper, whose methods are its own and whose parts are those of its module."""

    def __init__(self, wrapped: FullyShardedDataParallel) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        of = self._wrapped if name in {"to", "float", "half", "double"} else self._wrapped.module
        return getattr(of, name)


def compare(
    order: str, convert: Convert, of_optimizer: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Train both; every loss, parameter, average and buffer has the same bits."""
    given = {"of_optimizer": of_optimizer or {}, **options}
    torch.manual_seed(3)
    want, one = made(order, convert, before=True, **given)
    torch.manual_seed(3)
    wrapped, optimizer = made(order, convert, before=False, **given)
    forms = [(name, each.dtype, each.shape) for name, each in want.named_parameters()]
    assert [(name, each.dtype, each.shape) for name, each in wrapped.named_parameters()] == forms
    got, wanted = train(wrapped, optimizer, loss_of), train(want, one, loss_of)
    assert got == wanted, (got, wanted)
    assert [*one.pieces().values()] == [*optimizer.pieces().values()]
    of_one, of_other = want.state_dict(), wrapped.state_dict()
    for name, value in of_other.items():
        assert value.dtype == of_one[name].dtype, name
        assert torch.equal(value, of_one[name]), name
    return wrapped, optimizer


def converts(order: str, how: str) -> None:
    compare(order, CONVERSIONS[how])


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("first", "to"),
        ("first", "part"),
        ("later", "half"),
        ("later", "twice"),
        ("built between", "double"),
        ("in place", "part"),
    ],
)
def test_a_model_converted_after_wrapping_has_the_bits_of_one_converted_before(
    ranks2: Ranks, order: str, how: str
) -> None:
    ranks2.run(converts, order, how)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["first", "later", "built between", "in place"])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_every_conversion_does_at_every_moment(ranks_2_and_4: Ranks, order: str, how: str) -> None:
    ranks_2_and_4.run(converts, order, how)


def converts_with(options: dict[str, Any], of_optimizer: dict[str, Any]) -> None:
    for order in ("first", "later"):
        _, optimizer = compare(order, CONVERSIONS["to"], of_optimizer, **options)
        masters = [entry[MASTER].dtype for entry in optimizer.owned_state().values() if MASTER in entry]
        assert set(masters) <= {torch.float32}
        assert bool(masters) == ("master_dtype" in of_optimizer)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"reshard_after_forward": False}, {"master_dtype": torch.float32, "ema_decay": 0.5}),
    ({"reshard_after_forward": 1, "accumulate": "local"}, {"ema_decay": 0.5}),
]


@pytest.mark.parametrize(("options", "of_optimizer"), OPTIONS)
def test_masters_averages_and_kept_units_follow_a_conversion(
    ranks2: Ranks, options: dict[str, Any], of_optimizer: dict[str, Any]
) -> None:
    ranks2.run(converts_with, options, of_optimizer)


def computes_narrow() -> None:
    """What owners keep is converted; what is computed with stays as the policy says."""
    bfloat16 = PrecisionPolicy(params=torch.bfloat16, buffers=torch.float32)
    for convert in (nn.Module.double, nn.Module.bfloat16, lambda model: model.bfloat16().float()):
        wrapped, optimizer = compare("first", convert, mixed_precision=bfloat16)
        assert wrapped.module.last.weight.dtype == torch.bfloat16
        kept = optimizer.kept_dtype(wrapped.module.last.weight)
        assert wrapped.state_dict()["module.last.weight"].dtype == kept
        assert full_state_dict(wrapped, ranks=(0, 1))["last.weight"].dtype == kept  # type: ignore[index]
    model = Any16()
    one = FullyShardedDataParallel(model, units=[*model.blocks], mixed_precision=bfloat16)
    with pytest.raises(ValueError, match=r"cannot hold what owners keep of fixed"):
        one.half()
    assert model.last.weight.dtype == torch.bfloat16
    assert model.shift.dtype == torch.float32


def test_a_policy_goes_on_after_a_conversion(ranks2: Ranks) -> None:
    ranks2.run(computes_narrow)


def in_files(folder: Path) -> None:
    compare("first", CONVERSIONS["double"], offload=Offload(folder, 2**17))
    compare("later", CONVERSIONS["to"], offload=Offload(folder, 2**17))


def test_rows_in_files_follow_a_conversion(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(in_files, tmp_path)


def from_meta() -> None:
    results = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tower()
        if device == "cpu":
            model.double()
        wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
        optimizer = optimizer_over(wrapped.double())
        for step in range(2):
            wrapped(batch(step).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(wrapped.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_a_model_from_the_meta_device_is_converted(ranks2: Ranks) -> None:
    ranks2.run(from_meta)


def over_a_mesh(splits: bool) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    group = None if splits else mesh.get_group(1)
    states = []
    for before in (True, False):
        model = Tower()
        if before:
            model.bfloat16()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-2)
        wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks], mesh=mesh)
        wrapped.bfloat16()
        for step in range(2):
            wrapped(batch(step).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(wrapped.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("splits", [False, True])
def test_a_model_over_a_mesh_is_converted(ranks4: Ranks, splits: bool) -> None:
    ranks4.run(over_a_mesh, splits)


# ---------------------------------------------------------------------- uses before the first forward pass


def used_before(folder: Path) -> None:
    """Whatever is done between the conversion and the first pass sees the new form."""
    want = Tower().bfloat16().state_dict()

    def wrapped() -> tuple[Any, ZeroRedundancyOptimizer]:
        model = Tower()
        optimizer = optimizer_over(model)
        return FullyShardedDataParallel(model, optimizer, units=[*model.blocks]).bfloat16(), optimizer

    def check(state: Any) -> None:
        assert all(torch.equal(value, want[name]) for name, value in state.items()), [*state]

    one, optimizer = wrapped()
    check(one.module.state_dict())
    with pytest.raises(RuntimeError, match=r"call this after `with unsharded\(model\): pass`"):
        sharded_state_dict(one.to(torch.float32))
    with unsharded(one):
        check({name: value.bfloat16() for name, value in one.module.named_parameters()})
    rows = sharded_state_dict(one)["rows"]
    assert {each["values"].dtype for each in rows.values()} == {torch.float32}
    one, optimizer = wrapped()
    full = full_state_dict(one, ranks=(0, 1))
    check(full)
    one.module.load_state_dict({name: value * 2 for name, value in want.items()})
    checkpoint.save(folder / "saved", model=one.float(), optimizer=optimizer)
    one, optimizer = wrapped()
    checkpoint.load(folder / "saved", model=one, optimizer=optimizer)
    check({name: value / 2 for name, value in one.module.state_dict().items()})
    one, optimizer = wrapped()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="the optimizer has taken 1 steps or loads"):
        one.float()
    one, optimizer = wrapped()
    optimizer.step()  # nothing has a gradient
    check(one.module.state_dict())
    one, optimizer = wrapped()
    with torch.no_grad():
        assert one.module.blocks[0](torch.ones(2, 24).bfloat16()).dtype == torch.bfloat16
    check(one.module.state_dict())


def test_whatever_is_done_after_a_conversion_sees_the_new_form(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(used_before, tmp_path)


def shows_at_once() -> None:
    """Parameters show their dtype at once, without memory for them, and no collective."""
    model = Tower()
    model.register_buffer("shift", torch.zeros(2))
    optimizer = optimizer_over(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    optimizer.metrics()
    params = [*wrapped.parameters()]
    assert wrapped.bfloat16() is wrapped
    assert all(a is b for a, b in zip(params, wrapped.parameters(), strict=True))
    for param in params:
        assert param.dtype == torch.bfloat16
        assert param.isnan().all()
        assert param.untyped_storage().nbytes() == 2
    assert model.shift.dtype == torch.bfloat16
    assert optimizer.metrics()["collectives/total"] == 0
    model(batch(0).bfloat16())
    optimizer.metrics()
    model(batch(0).bfloat16())  # later passes agree on nothing
    assert optimizer.metrics()["collectives/agree"] == 0


def test_a_conversion_is_shown_at_once_and_takes_neither_memory_nor_collectives(ranks2: Ranks) -> None:
    ranks2.run(shows_at_once)


# ---------------------------------------------------------------------- refusals


def differ(first: bool) -> None:
    model = Tower()
    optimizer = optimizer_over(model) if first else None
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    if dist.get_rank():
        model.blocks[1].half()
    told = r"rank 0 has parameter blocks\.1\.norm\.weight: torch\.float32 on cpu; rank 1 has .*float16.*alike"
    with pytest.raises(RankMismatchError, match=told):
        wrapped(batch(0))
    if not first:
        with pytest.raises(RankMismatchError, match=told):
            optimizer_over(wrapped)
    with pytest.raises(RankMismatchError, match=told):
        wrapped.state_dict()
    if not dist.get_rank():
        model.blocks[1].half()
    wrapped.float()
    optimizer = optimizer_over(wrapped) if optimizer is None else optimizer
    train(wrapped, optimizer, loss_of)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_convert_differently_raise_together_and_can_mend_it(ranks2: Ranks, first: bool) -> None:
    ranks2.run(differ, first)


def too_late() -> None:
    model = Tower()
    optimizer = optimizer_over(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    model.register_buffer("shift", torch.zeros(2))
    next(model.parameters()).grad = torch.ones(24, 8)
    with pytest.raises(RuntimeError, match=r"there are gradients: call zero_grad\(\) first"):
        model.double()
    wrapped.zero_grad()
    with unsharded(model), pytest.raises(RuntimeError, match="somebody to read or write"):
        model.double()
    with torch.no_grad():
        wrapped(batch(0))
    for convert in (wrapped.half, model.half, model.blocks[0].norm.double):
        with pytest.raises(RuntimeError, match=r"until its first forward pass, and that has begun\. .*save"):
            convert()
    assert model.shift.dtype == torch.float32  # nothing was converted
    assert wrapped.to(torch.float32).float() is wrapped
    train(wrapped, optimizer, loss_of)


def no_conversions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
    wrapped = FullyShardedDataParallel(model, units=[model[1]])
    for convert in (
        lambda: wrapped.to("meta"),
        lambda: model.to(memory_format=torch.channels_last),
    ):
        with pytest.raises(RuntimeError, match=r"owners keep them\. Do that before wrapping"):
            convert()
    with pytest.raises(RuntimeError, match="other values or other memory"):
        model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="other values or other memory"):
        model._apply(lambda tensor: tensor.double() * 2)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="puts others in their place"):
            model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with torch.no_grad():
        assert wrapped(torch.ones(1, 3, 6, 6)).isfinite().all()


def test_conversions_that_come_too_late_are_refused(ranks2: Ranks) -> None:
    ranks2.run(too_late)


def test_what_is_no_conversion_is_refused(ranks1: Ranks) -> None:
    ranks1.run(no_conversions)
