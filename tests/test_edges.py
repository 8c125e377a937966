"""What users do to an optimizer from outside: each either acts as in torch.optim or raises."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from own_classes import Small
from pool import on_ranks
from training import (
    MATRICES,
    adamw_pair,
    assert_same_bits,
    assert_same_state,
    make_params,
    pair_of,
    params_of,
    set_grads,
    sgd,
    train_both,
    twin,
    whole,
)
from zero_optim import NotConsolidatedError, RankMismatchError, ZeroRedundancyOptimizer, checkpoint


@on_ranks(2)
def test_looking_at_the_state_of_others_loses_nothing() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    for p in params_of(sharded) if dist.get_rank() == 0 else ():
        sharded.state[p].get("exp_avg")  # leaves an empty entry in a defaultdict
    assert_same_state(whole(sharded), plain.state_dict())
    train_both(plain, sharded, 2, first=1)


@on_ranks(2)
def test_parameters_moved_between_groups_or_taken_out_count_as_in_torch() -> None:
    params = make_params()

    def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": p[:4], "lr": 0.1}, {"params": p[4:], "lr": 0.01}]

    plain = torch.optim.AdamW(groups(params))
    sharded = ZeroRedundancyOptimizer(groups(twin(params)), torch.optim.AdamW)
    train_both(plain, sharded, 1)
    for optimizer in (plain, sharded):
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop(1))  # moved to the other group
        removed = first["params"].pop(2)
        removed.grad = torch.ones_like(removed)
        second["eps"] = 1e-3
    train_both(plain, sharded, 2, first=1)
    sharded.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    with pytest.raises(
        ValueError, match=r"2 of group 0 .* has no owner: add parameters with add_param_group"
    ):
        sharded.step()
    sharded.param_groups[0]["params"][-1] = sharded.param_groups[1]["params"][0]
    with pytest.raises(ValueError, match=r"each parameter once in the groups, got parameter 0 of group 1"):
        sharded.step()


@on_ranks(2)
def test_data_that_parameters_swap_is_swapped() -> None:
    """One was lost: the place that its new data lay in was written first."""
    params = [nn.Parameter(torch.full((4, 4), float(value))) for value in (1, 2, 3)]
    optimizer = sgd(params, lr=1.0)
    optimizer.step()
    for first, second in ((0, 1), (1, 2)):
        params[first].data, params[second].data = params[second].data, params[first].data
    set_to = [param.clone() for param in params]
    assert [value[0, 0].item() for value in set_to] == [2, 3, 1]
    optimizer.step()
    assert_same_bits(params, set_to)


class Forgetful(Small):
    """Uses an option only while its group has it."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * group.get("boost", 1.0))


@on_ranks(2)
def test_options_added_and_deleted_by_hand_are_seen() -> None:
    plain, sharded = pair_of(Forgetful, lr=0.1)
    for boost in (3.0, None):
        for optimizer in (plain, sharded):
            optimizer.param_groups[0].pop("boost", None)
            if boost is not None:
                optimizer.param_groups[0]["boost"] = boost
        train_both(plain, sharded, 2)
    assert "boost" not in sharded.param_groups[0]


@on_ranks(2)
def test_data_replaced_inside_a_closure_is_gathered() -> None:
    plain, sharded = pair_of(torch.optim.SGD, lr=0.1)
    for step in range(3):
        for optimizer in (plain, sharded):
            own = params_of(optimizer)

            def closure(own: list[Tensor] = own, step: int = step) -> float:
                set_grads(own, step)
                for p in own:
                    p.data = p.data.clone()
                return 0.0

            optimizer.step(closure)
        assert_same_bits(params_of(sharded), params_of(plain), f"after step {step}")


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_a_memory_format_changed_on_one_rank_scrambles_nothing(view: bool) -> None:
    plain, sharded = pair_of(torch.optim.SGD, make_params(((8, 4, 3, 3), (4, 2, 5, 5))), view, lr=0.1)
    for p in params_of(sharded) if dist.get_rank() == 0 else ():
        p.data = p.data.contiguous(memory_format=torch.channels_last)
    train_both(plain, sharded, 3)


class Picky(torch.optim.AdamW):
    """Refuses, on one rank, state that it does not know: after the base class has taken it over."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() == 1:
            raise KeyError("exp_avg")


@on_ranks(2)
def test_a_load_that_the_class_refuses_on_one_rank_changes_nothing_on_any() -> None:
    plain, _ = adamw_pair()
    sharded = ZeroRedundancyOptimizer(twin(params_of(plain)), Picky, lr=0.01)
    train_both(plain, sharded, 2)
    for foreign in (
        torch.optim.SGD(make_params(), lr=0.5, momentum=0.9),
        torch.optim.AdamW(make_params(), lr=0.5),
    ):
        set_grads(params_of(foreign), 0)
        foreign.step()
        with pytest.raises((KeyError, RuntimeError), match=r"step|exp_avg|rank 1 failed with KeyError"):
            sharded.load_state_dict(foreign.state_dict())
    assert sharded.param_groups[0]["lr"] == 0.01
    train_both(plain, sharded, 2, first=2)
    assert_same_state(whole(sharded), plain.state_dict())


@on_ranks(2)
def test_a_dict_whose_options_differ_between_ranks_is_refused() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    given = copy.deepcopy(plain.state_dict())
    given["param_groups"][0]["lr"] = 0.2 + dist.get_rank()
    with pytest.raises(RankMismatchError, match=r"lr=0.2.*lr=1.2"):
        sharded.load_state_dict(given)
    train_both(plain, sharded, 2, first=1)


class Choosy(torch.optim.AdamW):
    """Takes matrices only, and says so wherever it is given anything else."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(p.dim() != 2 for p in param_group["params"]):
            raise ValueError("Choosy takes matrices only")


@on_ranks(2)
def test_a_group_the_class_refuses_is_not_added_and_an_added_one_makes_dicts_stale() -> None:
    plain, sharded = pair_of(Choosy, make_params(MATRICES), lr=0.1)
    train_both(plain, sharded, 1)
    owned = sharded.owned_parameters()
    with pytest.raises(ValueError, match="Choosy takes matrices only"):
        sharded.add_param_group({"params": make_params(((3, 3), (4,), (2, 2)), seed=4)})
    assert len(sharded.param_groups) == 1
    assert all(a is b for a, b in zip(owned, sharded.owned_parameters(), strict=True))
    train_both(plain, sharded, 2, first=1)
    sharded.consolidate_state_dict()
    sharded.add_param_group({"params": make_params(((3, 3),), seed=4)})
    with pytest.raises(NotConsolidatedError):
        sharded.state_dict()


class DecaysAll(torch.optim.SGD):
    """Decays whatever it holds, gradients or not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_frozen_parameters_are_gathered_when_the_class_moves_them(view: bool) -> None:
    params = make_params()
    for p in params[::2]:
        p.requires_grad_(False)
    plain, sharded = pair_of(DecaysAll, params, view, lr=0.1)
    assert not any("frozen" in line for line in sharded.explain().buckets)
    train_both(plain, sharded, 3)
    with pytest.raises(ValueError, match="changes parameters that have no gradient"):
        ZeroRedundancyOptimizer(params_of(sharded), DecaysAll, overlap_with_ddp=True, lr=0.1)


class OwnMasters(torch.optim.SGD):
    """Steps copies of its parameters, or of those added later alone, in groups of its making."""

    def __init__(self, params: Any, lr: float = 0.1, late: bool = False) -> None:
        self.masters: dict[Any, Any] = {}
        self.late = late
        super().__init__(params, lr=lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not self.late or len(self.param_groups) > 1:
            self.masters |= {p: nn.Parameter(p.detach().float().clone()) for p in group["params"]}
            group["params"] = [self.masters[p] for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        super().step()
        for p, master in self.masters.items():
            p.copy_(master)


@on_ranks(2)
def test_a_class_with_groups_over_tensors_of_its_own_is_refused() -> None:
    for assume in (False, True):
        with pytest.raises(ValueError, match=r"OwnMasters .*groups over other tensors.*master_dtype"):
            ZeroRedundancyOptimizer(make_params(), OwnMasters, assume_separable=assume, lr=0.1)
    sharded = ZeroRedundancyOptimizer(make_params(), OwnMasters, assume_separable=True, lr=0.1, late=True)
    with pytest.raises(ValueError, match=r"OwnMasters .*groups over other tensors"):
        sharded.add_param_group({"params": make_params(((3,), (4,)), seed=1)})
    assert len(sharded.param_groups) == 1
    set_grads(params_of(sharded), 0)
    sharded.step()


@on_ranks(2)
def test_parameters_that_were_taken_out_of_a_group_are_not_saved_in_silence(tmp_path: Path) -> None:
    plain, optimizer = adamw_pair()
    train_both(plain, optimizer, 2)
    for place in range(len(params_of(plain)) - 1, -1, -3):
        removed = optimizer.param_groups[0]["params"].pop(place)
        words = r"do not list all parameters .*state\.pop\(param, None\)"
        for call in (
            optimizer.consolidate_state_dict,
            partial(checkpoint.save, tmp_path, optimizer=optimizer),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        optimizer.detach()
        with pytest.raises(ValueError, match=words):
            optimizer.rebind()
        optimizer.param_groups[0]["params"].insert(place, removed)
        optimizer.rebind()
        assert_same_state(whole(optimizer), plain.state_dict())
    params = optimizer.param_groups[0]["params"]
    if dist.get_rank() == 0:
        removed = params.pop(0)
    with pytest.raises((RankMismatchError, ValueError), match=r"groups of \[\d+\] parameters|do not list"):
        optimizer.consolidate_state_dict()
    if dist.get_rank() == 1:
        removed = params.pop(0)
    optimizer.state.pop(removed, None)
    plain.state.pop(params_of(plain)[0])
    del plain.param_groups[0]["params"][0]
    train_both(plain, optimizer, 2)
    assert_same_state(whole(optimizer), plain.state_dict())
