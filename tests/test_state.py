"""Whole state dicts: snapshots, staleness, loading, and what does not fit."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pool import on_ranks
from training import MIXED, adamw_pair, assert_same_state, make_params, params_of, set_grads, train_both, twin
from zero_optim import NotConsolidatedError, RankMismatchError, StateMismatchError, ZeroRedundancyOptimizer


@on_ranks(2, slow=4)
def test_before_any_step_every_rank_knows_the_whole_state() -> None:
    plain, sharded = adamw_pair()
    assert_same_state(sharded.state_dict(), plain.state_dict())
    sharded.add_param_group({"params": make_params(((2, 2),), seed=3)})
    assert len(sharded.state_dict()["param_groups"]) == 2
    params = make_params()
    adagrad = torch.optim.Adagrad(params, initial_accumulator_value=0.5)
    sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.Adagrad, initial_accumulator_value=0.5)
    assert_same_state(sharded.state_dict(), adagrad.state_dict())


@on_ranks(2, slow=4)
def test_a_consolidated_dict_is_a_snapshot_and_stale_ones_raise() -> None:
    plain, sharded = adamw_pair()
    rank = dist.get_rank()
    train_both(plain, sharded, 1)
    with pytest.raises(NotConsolidatedError, match=rf"consolidate_state_dict\(to={rank}\)"):
        sharded.state_dict()
    sharded.consolidate_state_dict(to=0)
    first = sharded.state_dict() if rank == 0 else None
    expected = copy.deepcopy(plain.state_dict())
    sharded.consolidate_state_dict(to=1)
    if rank < 2:  # bringing it to rank 1 leaves rank 0's copy valid
        assert_same_state(sharded.state_dict(), expected)
    train_both(plain, sharded, 2, first=1)
    if rank < 2:
        with pytest.raises(NotConsolidatedError, match="after the state was consolidated"):
            sharded.state_dict()
    if first is not None:
        assert_same_state(first, expected)
        steps = {float(entries["step"]) for entries in first["state"].values()}
        assert steps == {1.0}
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
        sharded.state_dict()["state"][0].clear()
        assert_same_state(sharded.state_dict(), plain.state_dict())


def take_params(sharded: ZeroRedundancyOptimizer, plain: torch.optim.Optimizer) -> None:
    for p, q in zip(params_of(sharded), params_of(plain), strict=True):
        p.data.copy_(q)


def snapshot_of(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, tuple[int, int]]]:
    """A deep copy, and where every tensor lies and how often it was changed."""
    places = {
        id(v): (v.data_ptr(), v._version)
        for entries in state_dict["state"].values()
        for v in entries.values()
        if isinstance(v, Tensor)
    }
    return copy.deepcopy(state_dict), places


@on_ranks(2, slow=4)
def test_loading_takes_options_fills_gaps_as_the_class_does_and_leaves_the_dict_as_it_was() -> None:
    plain, sharded = adamw_pair()
    set_grads(params_of(plain), 0)
    plain.step()
    given = copy.deepcopy(plain.state_dict())
    given["param_groups"][0]["lr"] = 0.5
    del given["param_groups"][0]["maximize"]  # an old file
    before, places = snapshot_of(given)
    plain.load_state_dict(copy.deepcopy(given))  # which it uses on
    sharded.load_state_dict(given)
    assert (sharded.param_groups[0]["lr"], sharded.param_groups[0]["maximize"]) == (0.5, False)
    assert len(sharded.state) == len(sharded.owned_parameters())
    take_params(sharded, plain)
    train_both(plain, sharded, 2, first=1)
    assert_same_state(given, before)
    assert snapshot_of(given)[1] == places
    assert all(entry is not None for entry in given["state"].values())


@on_ranks(2)
def test_state_of_a_wrong_shape_names_every_parameter_and_changes_nothing() -> None:
    plain, sharded = adamw_pair()
    names = [f"block.{i}" for i in range(len(MIXED))]
    named = ZeroRedundancyOptimizer(
        list(zip(names, twin(make_params()), strict=True)), torch.optim.AdamW, lr=0.01
    )
    train_both(plain, sharded, 1)
    wrong = copy.deepcopy(plain.state_dict())
    wrong["state"][4]["exp_avg"] = torch.zeros(2, 12)
    wrong["state"][6]["exp_avg_sq"] = torch.zeros(3)
    for optimizer in (sharded, named):
        state_before = copy.deepcopy(dict(optimizer.state))
        with pytest.raises(StateMismatchError) as caught:
            optimizer.load_state_dict(wrong)
        expected = "'block.4'" if optimizer is named else "parameter 4 of group 0"
        assert expected in str(caught.value)
        assert "(12, 2)" in str(caught.value)
        assert "'exp_avg' has shape (2, 12)" in str(caught.value)
        assert "'exp_avg_sq' has shape (3,)" in str(caught.value)
        assert len(optimizer.state) == len(state_before)
    train_both(plain, sharded, 1, first=1)


@on_ranks(2)
def test_a_dict_that_does_not_fit_on_one_rank_raises_on_all_and_changes_nothing() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    other = torch.optim.AdamW(make_params(((2, 2), (3,))), lr=0.1).state_dict()
    with pytest.raises(StateMismatchError, match=r"groups of \[2\] parameters, this optimizer has \[8\]"):
        sharded.load_state_dict(other)
    with pytest.raises(StateMismatchError, match="expected a state dict with 'state' and 'param_groups'"):
        sharded.load_state_dict({"model": {}})
    mine = plain.state_dict() if dist.get_rank() == 0 else other
    with pytest.raises(StateMismatchError, match=r"groups of \[2\]"):
        sharded.load_state_dict(mine)
    train_both(plain, sharded, 2, first=1)


@on_ranks(2)
def test_step_state_and_load_hooks_fire_once_and_see_the_whole() -> None:
    plain, sharded = adamw_pair()
    called: list[str] = []
    sharded.register_step_pre_hook(lambda *_: called.append("step pre"))
    sharded.register_step_post_hook(lambda *_: called.append("step post"))
    sharded.register_state_dict_pre_hook(lambda o: called.append("state pre"))
    sharded.register_state_dict_post_hook(lambda o, d: {**d, "mark": len(d["state"])})
    sharded.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "mark"})
    sharded.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    train_both(plain, sharded, 1)
    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert sharded.state_dict()["mark"] == len(MIXED)
    sharded.load_state_dict({**plain.state_dict(), "mark": 1})
    expected = ["step pre", "step post", *(["state pre"] if dist.get_rank() == 0 else []), "load post"]
    assert called == expected


@on_ranks(2, slow=4)
def test_the_state_is_brought_to_several_ranks_or_all() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded.consolidate_state_dict(to=[1, 0, 1])
    if rank < 2:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    else:
        with pytest.raises(NotConsolidatedError):
            sharded.state_dict()
    sharded.consolidate_state_dict(to=None)
    assert_same_state(sharded.state_dict(), plain.state_dict())
    for wrong in ([], [0, size], "all", True, size):
        expected = rf"expected to be a group rank from 0 to {size - 1} \(or a list of them, or None for all\)"
        with pytest.raises(ValueError, match=expected):
            sharded.consolidate_state_dict(to=wrong)  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match=r"rank 0 has to=0; rank 1 has to=1"):
        sharded.consolidate_state_dict(to=rank)
    train_both(plain, sharded, 1, first=1)


@on_ranks(2, slow=4)
def test_a_dict_that_one_rank_has_is_dealt_out() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    other = ZeroRedundancyOptimizer(twin(make_params()), torch.optim.AdamW, lr=0.5)
    rank = dist.get_rank()
    given = plain.state_dict() if rank == 1 else None
    before = copy.deepcopy(given)
    other.load_state_dict(given, src=1)
    if given is not None and before is not None:
        assert_same_state(given, before)
    assert other.param_groups[0]["lr"] == 0.01
    assert len(other.state) == len(other.owned_parameters())
    take_params(other, plain)
    train_both(plain, other, 2, first=1)
    for dictionary, src, text in (
        (plain.state_dict(), 0, "only rank 0 gives a state dict"),
        (None, 0, "expected a state dict, got None"),
        (None, 7, "expected src to be a group rank"),
    ):
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(dictionary, src=src)
    with pytest.raises(RankMismatchError, match="src="):
        other.load_state_dict(plain.state_dict(), src=rank)
    wrong = {"state": {}, "param_groups": []} if rank == 0 else None
    with pytest.raises(StateMismatchError, match="groups of"):
        other.load_state_dict(wrong, src=0)


class LookaheadBeside(Optimizer):
    """Keeps slow weights in the state of the optimizer that it wraps, as timm's does."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([torch.zeros(1)], base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then move half of the way."""
        self.base.step(closure)
        for param in self.param_groups[0]["params"]:
            entries = self.base.state[param]
            slow = entries.setdefault("lookahead_slow_buff", param.detach().clone())
            slow.lerp_(param, 0.5)
            param.copy_(slow)


@on_ranks(2)
def test_entries_of_a_parameter_that_another_rank_owns_are_refused() -> None:
    refused = pytest.raises(
        RuntimeError, match=r"state has lookahead_slow_buff of .*, which is owned by rank"
    )
    for is_read in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
            assert not is_read or not sharded.state[param]
        wrapper = LookaheadBeside(sharded)
        wrapper.step()
        with refused:
            wrapper.step()
        with refused:
            sharded.consolidate_state_dict()
