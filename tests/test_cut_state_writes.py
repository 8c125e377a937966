"""Scripts write to `optimizer.state`: with cut parameters, masters and averages as with torch.optim."""

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from cuts import ONE_A_BUCKET, cut_pair, cutting
from pool import on_ranks
from training import (
    assert_same_bits,
    assert_same_state,
    make_params,
    params_of,
    set_grads,
    train_both,
    whole,
)
from zero_optim import StateMismatchError, ZeroRedundancyOptimizer
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER
from zero_optim.step.state_view import OwnedEntries

SHAPES = ((32, 8), (7,), (64, 16))


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Optimizer, ZeroRedundancyOptimizer]:
    return cut_pair(make_params(SHAPES, dtype), **options)


def owned(optimizer: Optimizer) -> list[Tensor]:
    return [param for param in params_of(optimizer) if param in optimizer.state]


def set_entries(optimizer: Optimizer, own: list[Tensor]) -> None:
    for param in own:
        optimizer.state[param]["exp_avg"] = torch.zeros_like(optimizer.state[param]["exp_avg"])
        optimizer.state[param]["step"] = torch.tensor(5.0)


def pop_each(optimizer: Optimizer, _own: list[Tensor]) -> None:
    for param in params_of(optimizer):
        optimizer.state.pop(param, None)
    assert not set(optimizer.state) & set(params_of(optimizer))


def doubled(entries: dict[str, Any]) -> dict[str, Any]:
    return {**entries, "exp_avg": entries["exp_avg"] * 2}


ACTS: dict[str, Callable[[Optimizer, list[Tensor]], object]] = {
    "clear each": lambda optimizer, own: [optimizer.state[p].clear() for p in own],
    "set entries": set_entries,
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "delete each": lambda optimizer, own: [optimizer.state.__delitem__(p) for p in own],
    "pop each": pop_each,
    "set each": lambda optimizer, own: [
        optimizer.state.__setitem__(p, copy.deepcopy(dict(optimizer.state[p]))) for p in own
    ],
    "set others": lambda optimizer, own: [
        optimizer.state.__setitem__(p, doubled(optimizer.state[p])) for p in own
    ],
    "assign empty": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "assign dict": lambda optimizer, _: setattr(
        optimizer, "state", {param: doubled(entries) for param, entries in optimizer.state.items()}
    ),
    "update": lambda optimizer, own: optimizer.state.update({p: {} for p in own}),
}


@on_ranks(2)
@pytest.mark.parametrize("act", ACTS)
def test_a_write_to_the_state_of_cut_parameters_does_what_it_does_to_torch_optims(act: str) -> None:
    plain, sharded = pair()
    train_both(plain, sharded, 2)
    for optimizer in (plain, sharded):
        ACTS[act](optimizer, owned(optimizer))
    train_both(plain, sharded, 2, first=2)
    assert_same_state(whole(sharded), plain.state_dict())


@on_ranks(2)
def test_asking_for_state_that_is_not_there_makes_an_empty_entry() -> None:
    _, sharded = pair()
    param = params_of(sharded)[0]
    assert param not in sharded.state
    assert sharded.state.get(param) is None
    assert sharded.state[param] == {}
    sharded.state[param]["mark"] = 1
    assert sharded.state[param] == {"mark": 1}
    assert sharded.state.setdefault(param, {"mark": 2}) == {"mark": 1}
    assert [key for key in sharded.state] == [param]  # noqa: C416 - the keys are what it is about
    assert sharded.state.pop(param) == {"mark": 1}
    with pytest.raises(KeyError):
        sharded.state.pop(param)
    with pytest.raises(KeyError):
        del sharded.state[param]
    sharded.state["count"] = 3  # type: ignore[index]
    assert sharded.state["count"] == 3  # type: ignore[index]
    assert sharded.state.popitem() == ("count", 3)
    assert len(sharded.state) == 0


@on_ranks(2)
def test_a_state_that_was_put_aside_can_be_put_back_and_one_that_is_no_dict_is_refused() -> None:
    plain, sharded = pair()
    train_both(plain, sharded, 2)
    before = [optimizer.state for optimizer in (plain, sharded)]
    for optimizer in (plain, sharded):
        optimizer.state = defaultdict(dict)
    train_both(plain, sharded, 2, first=2)
    for optimizer, state in zip((plain, sharded), before, strict=True):
        optimizer.state = state
    train_both(plain, sharded, 2, first=4)
    assert_same_state(whole(sharded), plain.state_dict())
    sharded.state = [1]  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"expected optimizer.state to be a dict, got list"):
        sharded.step()


class Restarting(torch.optim.AdamW):
    """Puts another dict in the place of its state."""

    def restart(self) -> None:
        self.state = defaultdict(dict)


@on_ranks(2)
@pytest.mark.parametrize("cut", [True, False])
def test_a_class_may_replace_its_state(cut: bool) -> None:
    plain = Restarting(make_params(SHAPES), lr=0.01)
    with cutting() if cut else nullcontext():
        sharded = ZeroRedundancyOptimizer(
            make_params(SHAPES), Restarting, bucket_cap_mb=ONE_A_BUCKET, lr=0.01
        )
    train_both(plain, sharded, 2)
    plain.restart()
    sharded.restart()
    train_both(plain, sharded, 2, first=2)
    assert_same_state(whole(sharded), plain.state_dict())


# ---------------------------------------------------------------------- masters and averages


def with_masters() -> tuple[ZeroRedundancyOptimizer, list[Parameter]]:
    _, sharded = pair(torch.bfloat16, master_dtype=torch.float32, ema_decay=0.5)
    mine = params_of(sharded)
    for step in range(2):
        set_grads(mine, step)
        sharded.step()
    return sharded, [param for param in mine if param in sharded.state]


@on_ranks(2)
def test_a_write_to_a_master_or_an_average_is_one_unless_the_averages_stand_in_the_model() -> None:
    sharded, mine = with_masters()
    for param in mine:
        entries = sharded.state[param]
        assert isinstance(entries, OwnedEntries)
        assert list(entries) == ["step", "exp_avg", "exp_avg_sq", MASTER, EMA]
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
        entries[MASTER] = torch.full_like(entries[MASTER], 1.001)
        entries[EMA] = torch.full_like(entries[EMA], 3.0)
        assert torch.equal(
            sharded.optim.state[sharded.core.owned.leaves.leaf(param)]["exp_avg"], entries["exp_avg"]
        )
        assert bool((entries[MASTER] == 1.001).all() and (entries[EMA] == 3.0).all())
        assert bool(
            (sharded.core.owned.leaves.rows(param) == torch.tensor(1.001, dtype=torch.bfloat16)).all()
        )
        with pytest.raises(StateMismatchError, match=f"expected '{MASTER}' of a parameter of shape"):
            entries[MASTER] = torch.zeros(1, 2, 3)
        for name in (MASTER, EMA):
            with pytest.raises(TypeError, match=f"'{name}' is kept as long as the optimizer"):
                del entries[name]
        with pytest.raises(TypeError, match="expected the state of a parameter to be a mapping, got int"):
            sharded.state[param] = 3
    with sharded.averaged_weights():
        for param in mine:
            with pytest.raises(RuntimeError, match="the model holds the averaged weights"):
                sharded.state[param][MASTER] = torch.zeros_like(sharded.state[param][MASTER])
    sharded.param_groups[0]["lr"] = 0.0  # so that masters stay, and are what was written
    set_grads(params_of(sharded), 3)
    sharded.step()
    for param in mine:
        assert bool((sharded.state[param][MASTER] == 1.001).all())
        assert bool((sharded.state[param][EMA] == (3.0 + torch.tensor(1.001)) / 2).all())


def delete_what_is_there(optimizer: Optimizer, _own: list[Tensor]) -> None:
    for param in list(optimizer.state):
        popped = optimizer.state.pop(param)
        assert not torch.equal(popped[EMA], optimizer.state[param][EMA])
        assert list(optimizer.state[param]) == [MASTER, EMA]


def pop_items(optimizer: Optimizer, _own: list[Tensor]) -> None:
    for _ in range(len(optimizer.state)):
        optimizer.state.popitem()
    with pytest.raises(KeyError, match="masters and averages, which stay"):
        optimizer.state.popitem()


RESTARTS = {name: ACTS[name] for name in ("clear", "assign empty", "clear each")}
RESTARTS |= {"delete": delete_what_is_there, "pop items": pop_items}


@on_ranks(2)
@pytest.mark.parametrize("act", RESTARTS)
def test_masters_and_averages_start_again_with_the_state(act: str) -> None:
    sharded, mine = with_masters()
    RESTARTS[act](sharded, owned(sharded))
    sharded.param_groups[0]["lr"] = 0.0
    set_grads(params_of(sharded), 3)
    sharded.step()
    for param in mine:
        entries, rows = sharded.state[param], sharded.core.owned.leaves.rows(param).float()
        assert entries["step"] == 1
        assert torch.equal(entries[MASTER], rows)
        assert torch.equal(entries[EMA], rows)


@on_ranks(2)
def test_entries_with_a_master_can_be_rebuilt_and_copied() -> None:
    sharded, mine = with_masters()
    before = {param: sharded.state[param].copy() for param in mine}
    other = copy.deepcopy(sharded)
    for param, entries in sharded.state.items():
        sharded.state[param] = type(entries)({name: value.clone() for name, value in entries.items()})
    for param in mine:
        assert repr(copy.deepcopy(sharded.state[param])) == repr(before[param])
        assert type(copy.deepcopy(sharded.state[param])) is dict
    for optimizer in (sharded, other):
        set_grads(params_of(optimizer), 2)
        optimizer.step()
    assert_same_bits(params_of(sharded), params_of(other))
    for param, same in zip(mine, (param for param in params_of(other) if param in other.state), strict=True):
        assert torch.equal(sharded.state[param][MASTER], other.state[same][MASTER])
        assert torch.equal(sharded.state[param][EMA], other.state[same][EMA])


@on_ranks(2)
def test_state_that_is_set_goes_to_the_class_that_steps_the_parameter() -> None:
    mine = make_params(SHAPES)
    groups = [{"params": mine[:1]}, {"params": mine[1:], "optimizer_class": torch.optim.SGD, "lr": 0.1}]
    with cutting():
        sharded = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, bucket_cap_mb=ONE_A_BUCKET, lr=0.01)
    for param in sharded.owned_parameters():
        sharded.state[param]["mark"] = 1
    sharded.state["count"] = 2  # type: ignore[index]
    own = set(sharded.owned_parameters())
    of_sgd, of_adamw = sharded.core.owned.local.states
    marked = [
        sum("mark" in entries for entries in state.values() if isinstance(entries, dict))
        for state in (of_sgd, of_adamw)
    ]
    assert marked == [len(own - {mine[0]}), int(mine[0] in own)]
    assert of_adamw["count"] == of_sgd["count"] == 2
    sharded.state = dict(sharded.state)  # type: ignore[assignment]
    sharded.param_groups[0]["lr"] = 0.0
    sharded.step()
    assert {key: sharded.state[key] for key in own} == {key: {"mark": 1} for key in own}
