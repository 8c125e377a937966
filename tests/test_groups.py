"""Several optimizers in one, methods of the class, copies, and who gets which work."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cuts
from cuts import cut_pair
from pool import on_ranks
from training import (
    MATRICES,
    assert_same_bits,
    assert_same_state,
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

VECTORS = ((7,), (3,), (11,))


def mixed_groups(matrices: list[nn.Parameter], vectors: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.05, "cost": "matmul"},
        {"params": vectors, "weight_decay": 0.1},
    ]


@on_ranks(2)
@needs_muon
def test_a_group_with_its_class_may_be_added_and_saved_groups_name_neither_class_nor_cost() -> None:
    sharded, again = runs = [
        ZeroRedundancyOptimizer(
            mixed_groups(make_params(MATRICES), make_params(VECTORS, seed=1)), torch.optim.AdamW
        )
        for _ in range(2)
    ]
    extra = make_params(((4, 4), (2, 5)), seed=2)
    plain = torch.optim.Muon(twin(extra), lr=0.05)
    for optimizer in runs:
        added = {"params": twin(extra), "optimizer_class": torch.optim.Muon, "lr": 0.05}
        optimizer.add_param_group(added)
    for step in range(4):
        if step == 2:
            saved = whole(sharded)
            again.load_state_dict(saved)
            for mine, other in zip(params_of(again), params_of(sharded), strict=True):
                mine.data.copy_(other)
        for optimizer in (sharded, again) if step >= 2 else (sharded,):
            set_grads(params_of(optimizer), step)
            optimizer.step()
        for p, like in zip(params_of(plain), sharded.param_groups[-1]["params"], strict=True):
            p.grad = like.grad
        plain.step()
        assert_same_bits(sharded.param_groups[-1]["params"], params_of(plain), f"after step {step}")
    assert_same_bits(params_of(again), params_of(sharded))
    assert all("optimizer_class" not in group and "cost" not in group for group in saved["param_groups"])


@on_ranks(2)
def test_a_group_without_parameters_may_be_added_as_torch_optim_allows() -> None:
    params, more = make_params(VECTORS), make_params(((4, 4),), seed=1)
    plain = torch.optim.AdamW([{"params": []}, {"params": twin(params)}], lr=0.1)
    sharded = ZeroRedundancyOptimizer([{"params": []}, {"params": params}], torch.optim.AdamW, lr=0.1)
    for optimizer, own in ((plain, twin(more)), (sharded, more)):
        optimizer.add_param_group({"params": [], "lr": 0.5})
        optimizer.add_param_group({"params": own, "lr": 0.2})
    train_both(plain, sharded, 2)
    assert_same_state(whole(sharded), plain.state_dict())
    named = ZeroRedundancyOptimizer([("weight", twin(more)[0])], torch.optim.AdamW)
    with pytest.raises(ValueError, match="should be with/without names"):
        named.add_param_group({"params": []})


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


def places_of(optimizer: ZeroRedundancyOptimizer) -> set[int]:
    return {param.data_ptr() for param in params_of(optimizer) if param.numel()}


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_copies_train_on_by_themselves(view: bool) -> None:
    plain, sharded = cut_pair(make_params(cuts.SHAPES), parameters_as_bucket_view=view, ema_decay=0.5)
    train_both(plain, sharded, 2)
    before = [param.detach().clone() for param in params_of(sharded)]
    for other in (copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        assert not places_of(sharded) & places_of(other)
        assert all(leaf.untyped_storage().nbytes() == 4 for leaf in other.core.owned.leaves.separate.values())
        train_both(copy.deepcopy(plain), other, 3, first=2)
        assert_same_bits(params_of(sharded), before)
    other.consolidate_state_dict()
    other.add_param_group({"params": make_params(((2, 2),))})


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_copies_of_a_model_that_was_converted_have_its_dtype_and_train(view: bool) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=view
    )
    model.double()
    expected = [param.detach().clone() for param in model.parameters()]
    pair = model, optimizer
    for other, stepped in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert_same_bits(list(other.parameters()), expected)
        for param in other.parameters():
            param.grad = torch.ones_like(param)
        stepped.step()
        assert_same_bits(list(other.parameters()), [param - 0.1 for param in expected])


@pytest.mark.slow
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
