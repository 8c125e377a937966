"""State of cut parameters: joined to the dict of torch.optim, dealt out again, saved and loaded."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from cuts import SHAPES, cut_over
from pool import Pool, on_ranks
from training import (
    assert_same_state,
    make_params,
    params_of,
    train_both,
    twin,
    whole,
)
from zero_optim import StateMismatchError, ZeroRedundancyOptimizer
from zero_optim.plan.pieces import Piece
from zero_optim.plan.strides import strides_of_rows
from zero_optim.state.moving import CutState, Joined

TWO = CutState((5, 3), (Piece(0, 0, 2), Piece(1, 2, 5)), frozenset({"avg"}))


def joined(parts: list[dict[str, Any]], cut: CutState = TWO, here: int = 0) -> dict[str, Any]:
    """Join what two owners keep of parameter 0; one of them is this rank, the other one's is received."""
    target = Joined({0: cut})
    places = target.places_of(1 - here)
    sent = {0: {}}
    for name, value in parts[1 - here].items():
        if isinstance(value, Tensor):
            sent[0][name] = places((0, name), value.dtype, tuple(value.shape), value.stride()).copy_(value)
        else:
            sent[0][name] = value
    made = [target.copied({0: parts[here]}, here), sent]
    merged = target.merge(made if here == 0 else made[::-1])
    return dict(merged[0])


def test_state_whose_rows_do_not_lie_together_is_joined_all_the_same() -> None:
    whole = torch.randn(3, 5).t()
    parts = [
        {"avg": torch.empty_strided(s, (1, s[0])).copy_(v)}
        for s, v in (((2, 3), whole[:2]), ((3, 3), whole[2:]))
    ]
    found = joined(parts)["avg"]
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()
    assert strides_of_rows((1, 2), 2, (5, 3)) == (1, 5)


def test_a_count_beside_a_piece_of_one_element_is_none_of_its_rows() -> None:
    cut = CutState((3,), (Piece(0, 0, 2), Piece(1, 2, 3)), frozenset({"avg"}))
    parts = [{"avg": torch.ones(2), "step": torch.ones(1)}, {"avg": torch.zeros(1), "step": torch.ones(1)}]
    assert torch.equal(joined(parts, cut)["avg"], torch.tensor([1.0, 1.0, 0.0]))
    assert joined(parts, cut)["step"].shape == (1,)


@pytest.mark.parametrize(
    "other", [{}, {"avg": torch.zeros(3, 3, dtype=torch.float64)}, {"avg": torch.zeros(())}]
)
def test_owners_that_keep_different_entries_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match=r"'avg' for . of its 5 rows"):
        joined([{"avg": torch.zeros(2, 3)}, other])


def test_state_that_is_no_plain_tensor_cannot_be_joined() -> None:
    with pytest.raises(TypeError, match="cuts=False"):
        TWO.cut_entries({"avg": torch.zeros(2, 3).to_sparse()}, TWO.pieces[0])


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[call-overload]
        return super().step(closure)


CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "counting": (Counting, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
}


def pair_params() -> list[Parameter]:
    params = make_params(SHAPES)
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params


def pair(name: str = "adamw", *, cut: bool = True, **more: Any) -> tuple[Optimizer, ZeroRedundancyOptimizer]:
    """An unsharded optimizer, and one whose parameters are cut, or not."""
    optimizer_class, options = CLASSES[name]
    params = pair_params()
    mine = twin(params)
    return optimizer_class(params, **options), sharded_over(mine, name, cut=cut, **more)


def sharded_over(params: list[Parameter], name: str, *, cut: bool, **more: Any) -> ZeroRedundancyOptimizer:
    optimizer_class, options = CLASSES[name]
    if not cut:
        return ZeroRedundancyOptimizer(params, optimizer_class, cuts=False, **more, **options)
    return cut_over(params, optimizer_class, **more, **options)


@pytest.mark.parametrize(
    ("size", "name"), [*((2, name) for name in CLASSES if name != "counting"), (4, "adamw")]
)
def test_the_whole_state_of_cut_parameters_is_that_of_torch_optim(pool: Pool, size: int, name: str) -> None:
    pool.run(size, check_whole, name)


def check_whole(name: str) -> None:
    plain, sharded = pair(name)
    assert_same_state(sharded.state_dict(), plain.state_dict())
    train_both(plain, sharded, 3)
    for to in (0, dist.get_world_size() - 1, None):
        sharded.consolidate_state_dict(to=to)
        if to in (None, dist.get_rank()):
            assert_same_state(sharded.state_dict(), plain.state_dict())
    state = copy.deepcopy(plain.state_dict())
    for src in (None, 1):  # each owner loads its rows
        again = sharded_over(twin(params_of(plain)), name, cut=True)
        again.load_state_dict(state if src in (None, dist.get_rank()) else None, src=src)
        assert_same_state(whole(again), state)
    train_both(plain, again, 2, first=3)


def check_loaded_between(saved: dict[str, Any]) -> None:
    for cut in (True, False):
        sharded = sharded_over(pair_params(), "adamw", cut=cut)
        before = copy.deepcopy(saved)
        sharded.load_state_dict(saved)
        assert_same_state(saved, before)
        assert_same_state(whole(sharded), saved)


def made_by_two() -> dict[str, Any]:
    plain, sharded = pair()
    train_both(plain, sharded, 2)
    return whole(sharded)


def test_whole_states_travel_between_numbers_of_ranks_and_cuts(pool: Pool) -> None:
    saved = pool.run(2, made_by_two)[0]
    for size in (1, 2, 4):
        pool.run(size, check_loaded_between, saved)


@on_ranks(2)
def test_global_entries_stay_what_they_are() -> None:
    """State of the class itself is held by every rank, and global once it is consolidated."""
    plain, sharded = pair("counting")
    train_both(plain, sharded, 2)
    found = whole(sharded)
    assert found["state"]["count"] == 2
    assert found["state"].keys() == plain.state_dict()["state"].keys()
    _, again = pair("counting")
    again.load_state_dict(found)
    assert again.state["count"] == 2


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


@on_ranks(2)
def test_entries_that_come_with_an_option_are_joined_too() -> None:
    """SGD has no momentum when it is built: its buffers are unknown until a scheduler sets one."""
    plain, sharded = pair("sgd")
    for optimizer in (plain, sharded):
        optimizer.param_groups[0]["momentum"] = 0.9
    train_both(plain, sharded, 2)
    found = whole(sharded)
    assert_same_state(found, plain.state_dict())
    _, again = pair("sgd")
    again.load_state_dict(found)
    again_found = whole(again)
    assert_same_state(again_found, found)
