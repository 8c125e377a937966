"""Several optimizers in one, methods of the class, copies, and who gets which work."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from pool import on_ranks
from training import (
    MATRICES,
    assert_same_bits,
    make_params,
    needs_muon,
    pair_of,
    params_of,
    set_grads,
    train_both,
    twin,
    whole,
)
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.plan.costs import matmul_cost, numel_cost

VECTORS = ((7,), (3,), (11,))


def mixed_groups(matrices: list[nn.Parameter], vectors: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.05, "cost": "matmul"},
        {"params": vectors, "weight_decay": 0.1},
    ]


@on_ranks(2, 4)
@needs_muon
def test_muon_for_matrices_and_adamw_for_the_rest_equal_the_two_plain_optimizers() -> None:
    matrices, vectors = make_params(MATRICES), make_params(VECTORS, seed=1)
    mine, mine_too = twin(matrices), twin(vectors)
    muon = torch.optim.Muon(matrices, lr=0.05)
    adamw = torch.optim.AdamW([{"params": vectors, "weight_decay": 0.1}], lr=0.01)
    sharded = ZeroRedundancyOptimizer(mixed_groups(mine, mine_too), torch.optim.AdamW, lr=0.01)
    schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (muon, adamw, sharded)]

    def train(steps: range) -> None:
        for step in steps:
            for own in (matrices, vectors, mine, mine_too):
                set_grads(own, step)
            for optimizer in (muon, adamw, sharded):
                optimizer.step()
            for schedule in schedules:
                schedule.step()
            assert_same_bits([*mine, *mine_too], [*matrices, *vectors], f"after step {step}")

    train(range(4))
    assert set(sharded.state) == set(sharded.owned_parameters())
    extra = make_params(((4, 4), (2, 5)), seed=2)
    extra_twin = twin(extra)
    muon.add_param_group({"params": extra, "lr": 0.05})
    sharded.add_param_group({"params": extra_twin, "optimizer_class": torch.optim.Muon, "lr": 0.05})
    matrices.extend(extra)
    mine.extend(extra_twin)
    schedules[0].base_lrs.append(0.05)
    schedules[2].base_lrs.append(0.05)
    train(range(4, 7))
    saved = whole(sharded)
    assert all("optimizer_class" not in group and "cost" not in group for group in saved["param_groups"])
    for index, p in enumerate(matrices[: len(MATRICES)]):
        assert torch.equal(saved["state"][index]["momentum_buffer"], muon.state[p]["momentum_buffer"])
    again = ZeroRedundancyOptimizer(
        [
            *mixed_groups(twin(mine[: len(MATRICES)]), twin(mine_too)),
            {"params": twin(extra), "optimizer_class": torch.optim.Muon},
        ],
        torch.optim.AdamW,
    )
    again.load_state_dict(saved)
    for step in range(7, 9):
        for optimizer in (sharded, again):
            set_grads(params_of(optimizer), step)
            optimizer.step()
        assert_same_bits(params_of(again), params_of(sharded), f"after step {step}")


@on_ranks(2)
@needs_muon
def test_several_optimizers_evaluate_a_closure_once() -> None:
    matrices, vectors = make_params(MATRICES), make_params(VECTORS, seed=1)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_grads([*matrices, *vectors], len(calls))
        return 3.0

    sharded = ZeroRedundancyOptimizer(mixed_groups(matrices, vectors), torch.optim.AdamW)
    before = [p.detach().clone() for p in (*matrices, *vectors)]
    assert sharded.step(closure) == 3.0
    assert calls == [True]
    assert not any(torch.equal(a, b) for a, b in zip(before, (*matrices, *vectors), strict=True))


@on_ranks(2)
def test_arguments_of_another_class_and_unknown_costs_are_refused() -> None:
    matrices, vectors = make_params(MATRICES), make_params(VECTORS, seed=1)
    with pytest.raises(TypeError, match="betas"):
        ZeroRedundancyOptimizer(
            [{"params": matrices, "optimizer_class": torch.optim.SGD, "betas": (0.9, 0.9)}],
            torch.optim.AdamW,
        )
    with pytest.raises(ValueError, match=r"one of \['matmul', 'numel'\].*got 'flops'"):
        ZeroRedundancyOptimizer(vectors, torch.optim.AdamW, cost="flops")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite costs of at least 0, got -1"):
        ZeroRedundancyOptimizer(vectors, torch.optim.AdamW, cost=lambda p: -1)


@on_ranks(2)
@needs_muon
def test_cost_decides_who_owns_what() -> None:
    """A square matrix costs more than a long one of more elements, under Newton-Schulz."""
    params = make_params(((128, 128), (8, 3000), (8, 3000), (8, 3000)))
    by_size = ZeroRedundancyOptimizer(twin(params), torch.optim.Muon)
    by_work = ZeroRedundancyOptimizer(twin(params), torch.optim.Muon, cost="matmul")
    by_count = ZeroRedundancyOptimizer(twin(params), torch.optim.Muon, cost=lambda p: 1.0)
    rank = dist.get_rank()
    assert len(by_size.owned_parameters()) == 2
    assert len(by_work.owned_parameters()) == (1 if rank == 0 else 3)
    assert len(by_count.owned_parameters()) == 2
    train_both(torch.optim.Muon(params), by_work, 2)


def test_costs_are_those_of_the_operations() -> None:
    square, wide, vector = torch.empty(100, 100), torch.empty(10, 20, 5), torch.empty(50)
    assert numel_cost(vector) == matmul_cost(vector)
    assert matmul_cost(square) - numel_cost(square) == 5 * 6 * 100**3
    assert matmul_cost(wide) - numel_cost(wide) == 5 * (4 * 10**2 * 100 + 2 * 10**3)
    assert matmul_cost(torch.empty(0, 4)) == 0


class Averaging(torch.optim.SGD):
    """A schedule-free sort of class: steps on one point, evaluates at another, counts in its group."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                mean.lerp_(p.detach(), 1 / group["count"])
        return loss

    @torch.no_grad()
    def eval(self) -> str:
        for group in self.param_groups:
            for p in group["params"]:
                if "mean" in self.state[p]:
                    keep = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = keep
        return "swapped"

    train = eval  # noqa: A003


@on_ranks(2, slow=4)
def test_methods_of_the_class_are_reached_and_parameters_gathered_after_them() -> None:
    plain, sharded = pair_of(Averaging, lr=0.1)
    train_both(plain, sharded, 3)
    assert sharded.param_groups[0]["count"] == 3
    before = params_of(sharded)[0].detach().clone()
    assert plain.eval() == sharded.eval() == "swapped"
    assert_same_bits(params_of(sharded), params_of(plain), "after eval")
    assert not torch.equal(params_of(sharded)[0], before)
    plain.train()
    sharded.train()
    train_both(plain, sharded, 2, first=3)
    with pytest.raises(AttributeError, match="'ZeroRedundancyOptimizer' object has no attribute 'evaluate'"):
        sharded.evaluate()


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_on_by_themselves(how: str, view: bool) -> None:
    plain, sharded = pair_of(torch.optim.AdamW, view=view, lr=0.01)
    train_both(plain, sharded, 2)
    other = copy.deepcopy(sharded) if how == "deepcopy" else pickle.loads(pickle.dumps(sharded))
    assert_same_bits(params_of(other), params_of(plain))
    assert not any(a is b for a, b in zip(params_of(other), params_of(sharded), strict=True))
    train_both(copy.deepcopy(plain), other, 3, first=2)
    train_both(plain, sharded, 3, first=2)
    other.consolidate_state_dict()
    other.add_param_group({"params": make_params(((2, 2),))})


@on_ranks(2)
def test_pickling_over_a_sub_group_is_refused() -> None:
    pair = dist.new_group([0, 1])
    sharded = ZeroRedundancyOptimizer(make_params(), torch.optim.AdamW, pair)
    with pytest.raises(TypeError, match="sub-group cannot be pickled"):
        pickle.dumps(sharded)
    copy.deepcopy(sharded).step()


@on_ranks(2, timeout=400)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # dynamo's own imports
def test_a_compiled_step_gives_the_same_bits() -> None:
    plain, sharded = pair_of(torch.optim.SGD, make_params(((6, 5), (7,))), lr=0.1, momentum=0.9)
    # Both are compiled: in PyTorch 2.8 a compiled SGD rounds otherwise than SGD does.
    steps = [torch.compile(optimizer.step, backend="eager") for optimizer in (plain, sharded)]
    for number in range(4):
        for optimizer, step in zip((plain, sharded), steps, strict=True):
            set_grads(params_of(optimizer), number)
            step()
        assert_same_bits(params_of(sharded), params_of(plain), f"after step {number}")


@on_ranks(2)
@pytest.mark.parametrize("has_group", [False, True])
def test_a_parameter_without_owner_is_named_by_all_that_need_one(tmp_path: Path, has_group: bool) -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)
    model.late = nn.Parameter(torch.ones(2))
    group = optimizer.param_groups[0]
    if has_group:
        optimizer.param_groups.extend([{**group, "params": [model.late]}])
    else:
        group["params"].append(model.late)
    for call in (
        lambda: checkpoint.save(tmp_path / "two", model=model, optimizer=optimizer),
        lambda: checkpoint.load(tmp_path / "one", model=model, optimizer=optimizer),
        optimizer.consolidate_state_dict,
        lambda: optimizer.clip_grad_norm_(1.0),
        optimizer.explain,
        optimizer.owned_state,
        optimizer.pieces,
    ):
        with pytest.raises(
            ValueError, match=r"shape \(2,\) has no owner: add parameters with add_param_group"
        ):
            call()


@on_ranks(2)
def test_a_group_that_was_put_into_the_list_is_refused_by_what_asks_for_its_class() -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    group = optimizer.param_groups[0]
    optimizer.param_groups.extend([{**group, "params": [group["params"].pop()]}])
    with pytest.raises(ValueError, match=r"has 1 parameter groups, but param_groups lists 2: leave the list"):
        optimizer.core.shaped_entries(model.parameters())
