"""Fully sharded models that somebody converts, or whose parameters are replaced or written to oddly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from fully import NARROW, Tower, adamw, assert_equal, batch, fully, fully_later, loss_of, state_of, train
from pool import on_ranks
from zero_optim import ReductionError, checkpoint
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    PrecisionPolicy,
    full_state_dict,
    unsharded,
)

AS_KEPT_OR_ROUNDED = pytest.mark.parametrize("policy", [None, NARROW], ids=["as kept", "rounded"])

# ---------------------------------------------------------------------- conversions

CONVERSIONS: list[Callable[[Any], object]] = [
    lambda model: model.to(torch.bfloat16),
    nn.Module.half,
    lambda model: model.to_empty(device="cpu"),
    lambda model: model._apply(lambda tensor: tensor * 2),
]


@on_ranks(2)
def test_a_conversion_raises_before_anything_was_converted() -> None:
    model = Tower()
    model.register_buffer("shift", torch.zeros(2))
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    for convert in CONVERSIONS:
        for of in (wrapped, model):
            with pytest.raises(RuntimeError, match=r"cannot be converted or moved.*before it is wrapped"):
                convert(of)
    with pytest.raises(RuntimeError, match=r"cannot be converted or moved.*before it is wrapped"):
        model.blocks[1].norm.double()
    assert model.shift.dtype == torch.float32
    train(wrapped, optimizer)


@on_ranks(2)
def test_what_changes_no_parameter_of_a_unit_passes_and_converts_the_rest() -> None:
    model = Tower()
    model.register_buffer("shift", torch.zeros(2, dtype=torch.float64))
    model.first.requires_grad_(False)  # the optimizer does not have it
    optimizer = adamw(model.blocks)
    optimizer.add_param_group({"params": [*model.last.parameters()]})
    wrapped, _ = fully(model, optimizer)
    assert wrapped.to("cpu").float() is wrapped
    assert model.shift.dtype == torch.float32
    assert model.first.double().weight.dtype == torch.float64
    model.first.float()
    train(wrapped, optimizer)
    rounded, _ = fully_later(mixed_precision=PrecisionPolicy(params=torch.bfloat16))
    rounded.float()
    with pytest.raises(
        RuntimeError, match=r"is torch\.float32 on cpu on its owners, and was to become torch\.bf"
    ):
        rounded.bfloat16()


# ---------------------------------------------------------------------- others in the place of parameters


@contextmanager
def swapping(swaps: bool) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@on_ranks(2)
@AS_KEPT_OR_ROUNDED
@pytest.mark.parametrize("swaps", [False, True])
def test_a_load_that_replaces_parameters_reaches_their_owners(
    policy: PrecisionPolicy | None, swaps: bool
) -> None:
    results = []
    for assigns, swapped in ((False, False), (True, swaps)):
        wrapped, optimizer = fully(mixed_precision=policy)
        train(wrapped, optimizer, 1)
        params = [*wrapped.parameters()]
        loaded = {name: value * 0.5 for name, value in state_of(wrapped).items()}
        with swapping(swapped):
            wrapped.module.load_state_dict(loaded, assign=assigns)
        assert all(map(lambda one, other: one is other, wrapped.parameters(), params))
        assert wrapped.units.nbytes_live() == 0
        assert_equal(state_of(wrapped), loaded)
        train(wrapped, optimizer, 2)
        results.append(state_of(wrapped))
    assert_equal(*results)


@on_ranks(2)
def test_parameters_that_were_swapped_for_others_are_named() -> None:
    model = Tower()
    whole = DistributedDataParallel(model, find_unused_parameters=True)
    for swapped in (model.first, model):
        with swapping(True):
            swapped.float()
        with pytest.raises(ReductionError, match=r"first.weight, .* became another tensor"):
            loss_of(whole, 0).backward()
    wrapped, _ = fully(find_unused_parameters=True)
    with swapping(True):
        for convert in (wrapped.float, wrapped.module.first.float, wrapped.module.float):
            with pytest.raises(RuntimeError, match="takes the hooks off"):
                convert()
    loss_of(wrapped, 0).backward()  # nothing was swapped


def assign(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(module.weight.shape))


REPLACING: list[tuple[Callable[[nn.Linear], object], str]] = [
    (nn.utils.parametrizations.weight_norm, r"{0}\.parametrizations\.weight\.original0, "),
    (assign, r"{0}\.weight"),
]


@on_ranks(2)
def test_other_parameters_in_the_place_of_those_that_were_wrapped_are_refused() -> None:
    for number, (replace, new) in enumerate(REPLACING):
        name = ("first", "blocks.1.up")[number % 2]
        wrapped, _ = fully(find_unused_parameters=True)
        loss_of(wrapped, 0).backward()
        replace(wrapped.module.get_submodule(name))
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=rf"a parameter of {name} of shape .* has gone, and {new.format(name)}"
            ):
                wrapped(batch(1))
            assert wrapped.units.nbytes_live() == 0
        with unsharded(wrapped, writes=False), pytest.raises(RuntimeError, match="has gone, and"):
            wrapped(batch(1))


@on_ranks(2)
def test_pruning_behind_the_wrapper_raises_in_the_next_training_pass() -> None:
    for inside in (None, "first"):
        wrapped, _ = fully(find_unused_parameters=True)
        where = nullcontext() if inside is None else unsharded(wrapped.module.get_submodule(inside))
        with where, torch.no_grad():
            prune.l1_unstructured(wrapped.module.blocks[0].down, "weight", 0.5)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"blocks\.0\.down\.weight of a .* was renamed.*unsharded"):
                wrapped(batch(1))


def rebuild(model: Tower) -> None:
    fresh = Tower()
    for name, _ in [*model.named_children()]:
        setattr(model, name, getattr(fresh, name))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) * self.scale


def inject(model: Tower) -> None:
    model.requires_grad_(False)
    model.blocks[0] = Adapter(model.blocks[0])


@on_ranks(2)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_training_pass_without_any_parameter_that_was_wrapped_is_refused(keeps: bool) -> None:
    for replace, new in (
        (rebuild, r"has gone, and .*first\.weight"),
        (inject, r"frozen by now, and blocks\.0\.scale"),
    ):
        wrapped, _ = fully(find_unused_parameters=True)
        loss_of(wrapped, 0).backward()
        kept = [*wrapped.modules()] if keeps else []
        replace(wrapped.module)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{new}.* came in its place"):
                wrapped(batch(1))
        kept.clear()


@on_ranks(2)
def test_a_parameter_with_other_data_is_not_saved_with_its_old_values(tmp_path: Path) -> None:
    wrapped, optimizer = fully()
    train(wrapped, optimizer, 1)
    weight = wrapped.module.first.weight
    if dist.get_rank() == 1:
        weight.data = torch.zeros(weight.shape)
    with pytest.raises(RuntimeError, match="got other memory, while its values were not on this rank"):
        checkpoint.save(tmp_path / "x", model=wrapped, optimizer=optimizer)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="got other memory, while its values were not on this rank"):
            wrapped.local_state_dict()


# ---------------------------------------------------------------------- state dicts that break off, or inside


class Refusing(nn.Linear):
    """Can break off the making of a state dict, and a load."""

    refuses = False

    def get_extra_state(self) -> int:
        if self.refuses:
            raise ValueError("no extra state today")
        return 1

    def set_extra_state(self, state: object) -> None:
        self.get_extra_state()


class Grim(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.last = Refusing(self.last.in_features, self.last.out_features)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Have the body fail."""
        self.last.refuses = True
        with pytest.raises((ValueError, RuntimeError), match="no extra state today"):
            yield
        self.last.refuses = False


@on_ranks(2)
@AS_KEPT_OR_ROUNDED
def test_training_goes_on_after_a_state_dict_that_was_not_finished(policy: PrecisionPolicy | None) -> None:
    (sharded, optimizer), (want, one) = (fully(Grim(), mixed_precision=policy) for _ in range(2))
    model = sharded.module
    assert train(sharded, optimizer, 1) == train(want, one, 1)
    with model.refusing():
        model.state_dict()
    assert_equal(state_of(sharded), state_of(want))
    assert train(sharded, optimizer, 2) == train(want, one, 2)
    assert all(param in optimizer.pieces() for param in model.parameters())
    assert_equal(state_of(sharded), state_of(want))
    with model.refusing():
        model.load_state_dict(want.module.state_dict(), assign=True)
    assert train(sharded, optimizer, 2) == train(want, one, 2)
    assert all(param in optimizer.pieces() for param in model.parameters())
    assert sharded.units.nbytes_live() == 0


@on_ranks(2)
def test_a_state_dict_inside_unsharded_shows_what_is_there() -> None:
    wrapped, optimizer = fully()
    train(wrapped, optimizer, 1)
    want = state_of(wrapped)
    with unsharded(wrapped):
        assert_equal(state_of(wrapped), want)
        with torch.no_grad():
            wrapped.module.blocks[0].up.weight.add_(1)
        inside = state_of(wrapped)
        half = {name: value * 0.5 for name, value in want.items()}
        everywhere = full_state_dict(wrapped, ranks=[0, 1])
    want["blocks.0.up.weight"] += 1
    for state in (inside, everywhere, state_of(wrapped)):
        assert_equal(state, want)
    with unsharded(wrapped):
        wrapped.module.load_state_dict(half)
    assert_equal(state_of(wrapped), half)
    assert wrapped.units.nbytes_live() == 0


@on_ranks(2)
def test_where_parameters_are_rounded_a_state_dict_inside_is_refused_and_changes_nothing() -> None:
    (wrapped, optimizer), (other, one) = (fully(mixed_precision=NARROW) for _ in range(2))
    train(wrapped, optimizer, 1)
    want = state_of(wrapped)
    for part in (wrapped, wrapped.module.blocks[1]):
        for call in (
            wrapped.module.state_dict,
            lambda: wrapped.module.load_state_dict(want),
            lambda: full_state_dict(wrapped),
        ):
            with unsharded(part), pytest.raises(RuntimeError, match="inside unsharded"):
                call()
    assert_equal(state_of(wrapped), want)
    train(other, one, 1)
    assert train(wrapped, optimizer, 2) == train(other, one, 2)
    assert_equal(state_of(wrapped), state_of(other))
    assert wrapped.units.nbytes_live() == 0


# ---------------------------------------------------------------------- other memory


@on_ranks(2)
def test_a_write_to_the_data_of_a_freed_parameter_raises_at_the_next_use() -> None:
    wrapped, optimizer = fully()
    model = wrapped.module
    train(wrapped, optimizer, 1)
    want = state_of(wrapped)
    writes: list[Callable[[Tensor], object]] = [torch.Tensor.zero_, lambda data: data[0].fill_(2)]
    for write in writes:
        write(model.blocks[0].up.bias.data)
        with pytest.raises(
            RuntimeError, match=r"written to, or got other memory, while its values were not on this rank"
        ):
            wrapped(batch(1))
        assert model.blocks[0].up.bias.isnan().all()
        assert_equal(state_of(wrapped), want)
    train(wrapped, optimizer, 1)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="other values or other memory"):
        model.to_empty(device="cpu")
    weight = model.blocks[0].up.weight
    weight.data = torch.empty_like(weight)
    for use in (model.state_dict, lambda: wrapped(batch(1)), optimizer.step):
        with pytest.raises(
            RuntimeError, match=r"written to, or got other memory, while its values were not on this rank"
        ):
            use()


@on_ranks(2)
def test_other_memory_is_taken_over_where_parameters_are_whole() -> None:
    wrapped, _ = fully_later()
    want = state_of(wrapped)
    with unsharded(wrapped), torch.no_grad():
        for param in wrapped.parameters():
            param.data = param * 2  # other memory
    assert_equal(state_of(wrapped), {name: value * 2 for name, value in want.items()})
    weight = wrapped.module.blocks[0].up.weight
    with pytest.raises(RuntimeError, match=r"became torch\.float64"), unsharded(wrapped):
        weight.data = weight.double()
