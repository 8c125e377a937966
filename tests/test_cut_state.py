"""State of cut parameters: joined to the dict of torch.optim, dealt out again, written to by scripts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from cuts import SHAPES, cut_over, cut_pair
from pool import Pool, on_ranks
from test_cut_runs import RESTARTS
from training import assert_same_state, make_params, params_of, set_grads, train_both, twin, whole
from zero_optim import StateMismatchError, ZeroRedundancyOptimizer
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER
from zero_optim.step.state_view import OwnedEntries

# ---------------------------------------------------------------------- whole states


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[call-overload]
        return super().step(closure)


CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "no momentum yet": (torch.optim.SGD, {"lr": 0.1}),
    "counting": (Counting, {"lr": 0.1, "momentum": 0.9}),
}


def pair(name: str = "adamw") -> tuple[Optimizer, ZeroRedundancyOptimizer]:
    """An unsharded optimizer, and one whose parameters are cut."""
    optimizer_class, options = CLASSES[name]
    params = make_params(SHAPES)
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return cut_pair(params, optimizer_class, options=options)


def again(name: str, params: list[Tensor], *, cut: bool = True) -> ZeroRedundancyOptimizer:
    """Another optimizer of this kind, over copies of parameters."""
    optimizer_class, options = CLASSES[name]
    if cut:
        return cut_over(twin(params), optimizer_class, **options)
    return ZeroRedundancyOptimizer(twin(params), optimizer_class, cuts=False, **options)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["adamw", "no momentum yet"])
def test_the_whole_state_of_cut_parameters_is_that_of_torch_optim(name: str) -> None:
    plain, sharded = pair(name)
    assert_same_state(sharded.state_dict(), plain.state_dict())
    if name == "no momentum yet":  # the buffers are unknown until a scheduler sets it
        for optimizer in (plain, sharded):
            optimizer.param_groups[0]["momentum"] = 0.9
    train_both(plain, sharded, 3)
    state = copy.deepcopy(plain.state_dict())
    for to in (0, dist.get_world_size() - 1, None):
        sharded.consolidate_state_dict(to=to)
        if to in (None, dist.get_rank()):
            assert_same_state(sharded.state_dict(), state)
    for src in (None, 1):  # each owner loads its rows
        other = again(name, params_of(plain))
        other.load_state_dict(state if src in (None, dist.get_rank()) else None, src=src)
        assert_same_state(whole(other), state)
    train_both(plain, other, 2, first=3)


@on_ranks(2)
def test_state_of_the_class_itself_is_on_every_rank_and_global_in_the_whole() -> None:
    plain, sharded = pair("counting")
    train_both(plain, sharded, 2)
    found = whole(sharded)
    assert found["state"]["count"] == 2
    assert found["state"].keys() == plain.state_dict()["state"].keys()
    other = again("counting", params_of(plain))
    other.load_state_dict(found)
    assert other.state["count"] == 2  # type: ignore[index]


def whole_of_adamw(saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train and give the whole state; or load it, with cuts and without."""
    plain, sharded = pair()
    if saved is None:
        train_both(plain, sharded, 2)
        return whole(sharded)
    before = copy.deepcopy(saved)
    for cut in (True, False):
        other = again("adamw", params_of(plain), cut=cut)
        other.load_state_dict(saved)
        assert_same_state(saved, before)
        assert_same_state(whole(other), saved)
    return saved


def test_whole_states_travel_between_numbers_of_ranks_and_cuts(pool: Pool) -> None:
    saved = pool.run(2, whole_of_adamw)[0]
    for size in (1, 2, 4):
        pool.run(size, whole_of_adamw, saved)


@on_ranks(2)
def test_state_of_a_piece_or_other_entries_on_one_owner_are_refused_on_every_rank() -> None:
    plain, sharded = pair()
    train_both(plain, sharded, 1)
    state = copy.deepcopy(plain.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:16]
    before = whole(sharded)
    for src in (None, 0):
        with pytest.raises(StateMismatchError, match=r"'exp_avg' has shape \(16, 8\)"):
            sharded.load_state_dict(state if src is None or dist.get_rank() == 0 else None, src=src)
    assert_same_state(whole(sharded), before)
    param = params_of(sharded)[0]
    if dist.get_rank() == 1:
        del sharded.optim.state[sharded.core.owned.leaves.leaf(param)]["exp_avg"]
    with pytest.raises(StateMismatchError, match="parameter 0 is cut, and its owners keep 'exp_avg' for 16"):
        sharded.consolidate_state_dict(to=0)


# ---------------------------------------------------------------------- what scripts write to it

FEW = ((32, 8), (7,), (64, 16))


def with_masters() -> tuple[ZeroRedundancyOptimizer, list[Parameter]]:
    _, sharded = cut_pair(make_params(FEW, torch.bfloat16), master_dtype=torch.float32, ema_decay=0.5)
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


def delete_what_is_there(optimizer: Any) -> None:
    for param in list(optimizer.state):
        popped = optimizer.state.pop(param)
        assert not torch.equal(popped[EMA], optimizer.state[param][EMA])
        assert list(optimizer.state[param]) == [MASTER, EMA]


WITH_MASTERS = {"clear": RESTARTS["clear"], "delete": delete_what_is_there}


@on_ranks(2)
@pytest.mark.parametrize("act", WITH_MASTERS)
def test_masters_and_averages_start_again_with_the_state(act: str) -> None:
    sharded, mine = with_masters()
    WITH_MASTERS[act](sharded)
    sharded.param_groups[0]["lr"] = 0.0
    set_grads(params_of(sharded), 3)
    sharded.step()
    for param in mine:
        entries, rows = sharded.state[param], sharded.core.owned.leaves.rows(param).float()
        assert entries["step"] == 1
        assert torch.equal(entries[MASTER], rows)
        assert torch.equal(entries[EMA], rows)
