"""Fully sharded models whose parameters somebody replaces, or writes to by another way than the usual."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pool import Ranks, on_ranks
from test_fully_sharded import Tower, adamw, batch
from test_fully_sharded_models import loss_of, train
from zero_optim import ReductionError, ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    PrecisionPolicy,
    full_state_dict,
    unsharded,
)

NARROW = PrecisionPolicy(params=torch.bfloat16, gradients=torch.float32, outputs=torch.float32)


def built(
    policy: PrecisionPolicy | None, model: nn.Module | None = None
) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = Tower() if model is None else model
    optimizer = adamw(model)
    units = [*model.blocks]  # type: ignore[arg-type]
    return FullyShardedDataParallel(model, optimizer, units=units, mixed_precision=policy), optimizer


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@contextmanager
def swapping(swaps: bool) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@on_ranks(2)
@pytest.mark.parametrize("policy", [None, NARROW], ids=["as kept", "rounded"])
@pytest.mark.parametrize(
    ("assign", "swaps"),
    [(True, False), pytest.param(False, True, marks=pytest.mark.exhaustive), (True, True)],
)
def test_a_load_that_replaces_parameters_reaches_their_owners(
    policy: PrecisionPolicy | None, assign: bool, swaps: bool
) -> None:
    results = []
    for assigns, swapped in ((False, False), (assign, swaps)):
        model, optimizer = built(policy)
        train(model, optimizer, loss_of, 1)
        params = [*model.parameters()]
        loaded = {name: value * 0.5 for name, value in state_of(model).items()}
        with swapping(swapped):
            model.module.load_state_dict(loaded, assign=assigns)
        assert all(map(lambda one, other: one is other, model.parameters(), params))
        assert model.units.nbytes_live() == 0
        assert_equal(state_of(model), loaded)
        train(model, optimizer, loss_of, 2)
        results.append(state_of(model))
    assert_equal(*results)


@on_ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_that_were_swapped_for_others_are_named(find_unused: bool) -> None:
    for wrap in (DistributedDataParallel, FullyShardedDataParallel):
        model = Tower()
        given = () if wrap is DistributedDataParallel else (adamw(model),)
        wrapped: Any = wrap(model, *given, find_unused_parameters=find_unused)
        with swapping(True):
            if given:
                for convert in (wrapped.float, model.first.float, model.float):
                    with pytest.raises(RuntimeError, match="takes the hooks off"):
                        convert()
                loss_of(wrapped, 0).backward()  # nothing was swapped
                return
            model.first.float()
        with pytest.raises(
            ReductionError, match=r"every rank: .*first.weight, first.bias became another tensor"
        ):
            loss_of(wrapped, 0).backward()
        with swapping(True):
            model.float()
        with pytest.raises(ReductionError, match=r"first.weight, .* became another tensor after"):
            loss_of(wrapped, 0).backward()


def norm_as_before(module: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # use the other one
        nn.utils.weight_norm(module)


def assign(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(module.weight.shape))


REPLACING: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "weight_norm": (nn.utils.parametrizations.weight_norm, r"{0}\.parametrizations\.weight\.original0, "),
    "the old weight_norm": (norm_as_before, r"{0}\.weight_g, {0}\.weight_v"),
    "an assignment": (assign, r"{0}\.weight"),
}


@on_ranks(2)
@pytest.mark.parametrize("how", REPLACING)
def test_other_parameters_in_the_place_of_those_that_were_wrapped_are_refused(how: str) -> None:
    replace, new = REPLACING[how]
    for name in ("first", "blocks.1.up"):
        model = Tower()
        wrapped = FullyShardedDataParallel(
            model, adamw(model), units=model.blocks, find_unused_parameters=True
        )
        loss_of(wrapped, 0).backward()
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        replace(module)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=rf"a parameter of {name} of shape .* has gone, and {new.format(name)}"
            ):
                wrapped(batch(1))
            assert wrapped.units.nbytes_live() == 0


@on_ranks(2)
def test_parameters_may_be_taken_out_or_get_other_names() -> None:
    model = Tower()
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(model, optimizer, units=model.blocks, find_unused_parameters=True)
    model.blocks[1].up.bias = None
    prune.random_unstructured(model.blocks[0].down, "weight", 0.5)
    train(wrapped, optimizer, loss_of)
    loss = loss_of(wrapped, 0)
    assert loss.isfinite()
    loss.backward()


class Refusing(nn.Linear):
    """Can break off the making of a state dict, and a load."""

    refuses = False

    def get_extra_state(self) -> int:
        if self.refuses:
            raise ValueError("no extra state today")
        return 1

    def set_extra_state(self, state: object) -> None:
        if self.refuses:
            raise ValueError("no extra state today")


class Grim(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.last = Refusing(self.last.in_features, self.last.out_features)


def state_of_tensors(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state_of_any(model).items() if isinstance(value, Tensor)}


def state_of_any(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.module.state_dict()
    return state


@on_ranks(2)
@pytest.mark.parametrize("policy", [None, NARROW], ids=["as kept", "rounded"])
def test_training_goes_on_after_a_state_dict_that_was_not_finished(policy: PrecisionPolicy | None) -> None:
    model, optimizer = built(policy, Grim())
    want, one = built(policy, Grim())
    before = train(want, one, loss_of, 1)
    want_state = state_of_tensors(want)
    want_after = train(want, one, loss_of, 2)
    assert train(model, optimizer, loss_of, 1) == before
    model.module.last.refuses = True
    with pytest.raises(ValueError, match="no extra state today"):
        model.module.state_dict()
    model.module.last.refuses = False
    assert_equal(state_of_tensors(model), want_state)
    model.module.last.refuses = True
    with pytest.raises(ValueError, match="no extra state today"):
        model.module.state_dict()
    assert train(model, optimizer, loss_of, 2) == want_after
    assert all(param in optimizer.pieces() for param in model.parameters())
    model.module.last.refuses = False
    assert_equal(state_of_tensors(model), state_of_tensors(want))
    model.module.last.refuses = True
    with pytest.raises((ValueError, RuntimeError), match="no extra state today"):
        model.module.load_state_dict(want.module.state_dict(), assign=True)
    assert train(model, optimizer, loss_of, 2) == train(want, one, loss_of, 2)
    assert all(param in optimizer.pieces() for param in model.parameters())
    assert model.units.nbytes_live() == 0


def is_asked_inside() -> None:
    """Inside `unsharded` a state dict shows what is there; what owners keep, rounded or not, stays right."""
    model, optimizer = built(None)
    train(model, optimizer, loss_of, 1)
    want = state_of(model)
    with unsharded(model):
        assert_equal(state_of(model), want)
        with torch.no_grad():
            model.module.blocks[0].up.weight.add_(1)
        inside = state_of(model)
        half = {name: value * 0.5 for name, value in want.items()}
        found = full_state_dict(model, ranks=[0, 1])
    assert found is not None
    want["blocks.0.up.weight"] += 1
    for state in (inside, found, state_of(model)):
        assert_equal(state, want)
    with unsharded(model):
        model.module.load_state_dict(half)
    assert_equal(state_of(model), half)
    assert model.units.nbytes_live() == 0


def is_refused_inside() -> None:
    """Where parameters are rounded, a state dict inside is refused, and nothing has changed then."""
    model, optimizer = built(NARROW)
    other, one = built(NARROW)
    train(model, optimizer, loss_of, 1)
    want = state_of(model)
    for part in (model, model.module.blocks[1]):
        with unsharded(part), pytest.raises(RuntimeError, match="leave unsharded"):
            model.module.state_dict()
        with unsharded(part), pytest.raises(RuntimeError, match="leave unsharded"):
            model.module.load_state_dict(want)
        with unsharded(part), pytest.raises(RuntimeError, match="leave unsharded"):
            full_state_dict(model)
    assert_equal(state_of(model), want)
    train(model, optimizer, loss_of, 2)
    train(other, one, loss_of, 1)
    train(other, one, loss_of, 2)
    assert_equal(state_of(model), state_of(other))
    assert model.units.nbytes_live() == 0


@pytest.mark.parametrize("check", [is_asked_inside, is_refused_inside])
def test_a_state_dict_inside_unsharded_is_right_or_refused(ranks2: Ranks, check: Callable[[], None]) -> None:
    ranks2.run(check)


@on_ranks(2)
def test_a_write_to_the_data_of_a_freed_parameter_raises_at_the_next_use() -> None:
    model, optimizer = built(None)
    train(model, optimizer, loss_of, 1)
    want = state_of(model)
    for write in (lambda data: data.fill_(1), lambda data: data.zero_(), lambda data: data[0].fill_(2)):
        write(model.module.blocks[0].up.bias.data)
        with pytest.raises(RuntimeError, match=r"written to, or given other memory, while it was not whole"):
            model(batch(1))
        assert model.module.blocks[0].up.bias.isnan().all()
        assert_equal(state_of(model), want)
    train(model, optimizer, loss_of, 1)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="other values or other memory"):
        model.module.to_empty(device="cpu")
    weight = model.module.blocks[0].up.weight
    weight.data = torch.empty_like(weight)
    for use in (model.module.state_dict, lambda: model(batch(1)), optimizer.step):
        with pytest.raises(RuntimeError, match=r"written to, or given other memory, while it was not whole"):
            use()


@on_ranks(2)
def test_shared_memory_is_refused_for_gradients_that_have_none() -> None:
    model, optimizer = built(None)
    other, one = built(None)
    train(model, optimizer, loss_of, 1)
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="share_memory_ of the gradient of"):
        model.share_memory()
    optimizer.zero_grad()
    model.share_memory()
    train(model, optimizer, loss_of, 2)
    train(other, one, loss_of, 1)
    train(other, one, loss_of, 2)
    assert_equal(state_of(model), state_of(other))
