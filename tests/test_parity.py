"""A sharded run gives the bits of the unsharded run."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from pool import Ranks, on_ranks
from training import (
    MATRICES,
    MIXED,
    assert_same_bits,
    assert_same_state,
    make_params,
    needs_muon,
    params_of,
    set_grads,
    train_both,
    twin,
)
from zero_optim import NotConsolidatedError, ZeroRedundancyOptimizer

CASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "muon": (getattr(torch.optim, "Muon", None), {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "partial": (partial(torch.optim.AdamW, betas=(0.8, 0.9)), {"lr": 1e-2}),
}


MUON = pytest.param("muon", marks=needs_muon)


def check_parity(case: str, view: bool) -> None:
    """Twelve steps equal; the state consolidates, loads into the plain class, and back."""
    optimizer_class, options = CASES[case]
    params = make_params(MATRICES if case == "muon" else MIXED)
    mine = twin(params)
    plain = optimizer_class(params, **options)
    sharded = ZeroRedundancyOptimizer(mine, optimizer_class, parameters_as_bucket_view=view, **options)
    assert sharded.defaults == plain.defaults
    train_both(plain, sharded, 12)
    assert params_of(sharded)[0] is mine[0]

    last = dist.get_world_size() - 1
    sharded.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        whole = sharded.state_dict()
        assert_same_state(whole, plain.state_dict())
        reloaded = optimizer_class(twin(mine), **options)
        reloaded.load_state_dict(whole)
        assert_same_state(reloaded.state_dict(), plain.state_dict())

    again = ZeroRedundancyOptimizer(twin(mine), optimizer_class, parameters_as_bucket_view=view, **options)
    again.load_state_dict(plain.state_dict())
    train_both(plain, again, 5, first=12)


@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
@pytest.mark.parametrize("case", [MUON if case == "muon" else case for case in CASES])
def test_parameters_and_state_equal_the_unsharded_run_bit_for_bit(
    ranks: Ranks, case: str, view: bool
) -> None:
    ranks.run(check_parity, case, view)


@pytest.mark.parametrize("case", ["adamw", MUON])
def test_some_classes_equal_the_unsharded_run_on_four_ranks(ranks4: Ranks, case: str) -> None:
    ranks4.run(check_parity, case, True)


@on_ranks(2, 4)
def test_several_groups_under_one_cycle_equal_the_unsharded_run() -> None:
    """Three groups with options of their own; a scheduler acts on all."""
    params = make_params()
    mine = twin(params)

    def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": p[:3], "weight_decay": 0.1},
            {"params": p[3:4], "lr": 0.5},
            {"params": (q for q in p[4:]), "betas": (0.5, 0.6)},
        ]

    plain = torch.optim.AdamW(groups(params), lr=1e-2)
    sharded = ZeroRedundancyOptimizer(groups(mine), torch.optim.AdamW, lr=1e-2)
    schedules = [lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2, 0.3], total_steps=12) for o in (plain, sharded)]
    train_both(plain, sharded, 10, after=lambda: [s.step() for s in schedules] and None)
    for mine_group, group in zip(sharded.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in mine_group.items() if k != "params"} == {
            k: v for k, v in group.items() if k != "params"
        }


SCHEDULERS = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=3, cycle_momentum=False
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR of PyTorch 2.8
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedules_act_as_on_the_plain_optimizer(name: str) -> None:
    params = make_params()
    plain = torch.optim.Adam(params, lr=0.05)
    sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.Adam, lr=0.05)
    schedules = [SCHEDULERS[name](o) for o in (plain, sharded)]
    train_both(plain, sharded, 8, after=lambda: [s.step() for s in schedules] and None)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


@on_ranks(2)
def test_every_form_in_which_torch_takes_parameters_trains() -> None:
    params = make_params()
    names = [f"layer{i}.weight" for i in range(len(params))]
    forms = {
        "list": lambda p: p,
        "generator": lambda p: (q for q in p),
        "dict with a generator": lambda p: [{"params": (q for q in p)}],
        "one tensor in a dict": lambda p: [{"params": q} for q in p],
        "named": lambda p: list(zip(names, p, strict=True)),
        "named generator": lambda p: (pair for pair in zip(names, p, strict=True)),
    }
    for form in forms.values():
        mine, theirs = twin(params), twin(params)
        sharded = ZeroRedundancyOptimizer(form(mine), torch.optim.AdamW, lr=torch.tensor(0.01))
        plain = torch.optim.AdamW(form(theirs), lr=torch.tensor(0.01))
        train_both(plain, sharded, 3)
        assert not torch.equal(mine[0], params[0])
        assert sharded.param_groups[0].get("param_names") == plain.param_groups[0].get("param_names")
        assert sharded.state_dict.__self__ is sharded


@on_ranks(2, slow=4)
def test_parameters_of_several_dtypes_train_together() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.complex64]
    params = [p for i, dtype in enumerate(dtypes) for p in make_params(((4, 3), (5,)), dtype, seed=i)]
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01)
    train_both(plain, sharded, 6)
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_channels_last_and_transposed_parameters_keep_their_strides(view: bool) -> None:
    params = make_params(((8, 4, 3, 3), (6, 5), (4, 2, 2, 2)))
    for p in (params[0], params[2]):
        p.data = p.data.to(memory_format=torch.channels_last)
    params[1].data = params[1].data.t()
    mine = twin(params)
    strides = [p.stride() for p in params]
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.01)
    train_both(plain, sharded, 4)
    assert [p.stride() for p in mine] == strides
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())


@on_ranks(2, slow=4)
def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    params = make_params()
    calls = []

    def closure_for(own: list[nn.Parameter]) -> Any:
        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            for p in own:
                p.grad = None
            loss = sum((p**2).sum() for p in own)
            loss.backward()
            return loss

        return closure

    mine = twin(params)
    plain = torch.optim.SGD(params, lr=0.1)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        assert torch.equal(plain.step(closure_for(params)), sharded.step(closure_for(mine)))
        assert_same_bits(mine, params)
    assert calls == [True] * 6
    set_grads(mine, 0)
    assert sharded.step() is None


@on_ranks(2, 4)
def test_freezing_unfreezing_and_added_groups_are_seen() -> None:
    params = make_params()
    params[0].requires_grad_(False)
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01)
    before = mine[0].detach().clone()
    train_both(plain, sharded, 2)
    assert torch.equal(mine[0], before)
    for own in (params, mine):
        own[0].requires_grad_(True)
        own[4].requires_grad_(False)
    train_both(plain, sharded, 2, first=2)
    assert not torch.equal(mine[0], before)
    extra = make_params(((9, 4), (3,)), seed=5)
    extra[1].requires_grad_(False)
    extra_twin = twin(extra)
    plain.add_param_group({"params": extra, "lr": 0.1})
    sharded.add_param_group({"params": (p for p in extra_twin), "lr": 0.1})
    train_both(plain, sharded, 2, first=4)
    for own in (extra, extra_twin):
        own[1].requires_grad_(True)
    train_both(plain, sharded, 2, first=6)
    assert not torch.equal(extra_twin[1], make_params(((9, 4), (3,)), seed=5)[1])
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same_state(
            sharded.state_dict(),
            {**plain.state_dict(), "state": dict(sorted(plain.state_dict()["state"].items()))},
        )


@on_ranks(2)
def test_a_frozen_parameter_that_kept_its_gradient_moves_as_in_torch() -> None:
    """torch.optim goes on moving a parameter that was frozen with its gradient still there."""
    params = make_params(((4, 4), (3,)))
    mine = twin(params)
    plain = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.SGD, lr=0.1, momentum=0.9)
    train_both(plain, sharded, 2)
    for _ in range(3):
        for own in (params, mine):
            for p in own:
                p.requires_grad_(False)
        plain.step()
        sharded.step()
        assert_same_bits(mine, params)


@on_ranks(2)
def test_parameters_without_gradient_on_some_steps_are_left_alone_on_those() -> None:
    params = make_params()
    mine = twin(params)
    plain = torch.optim.Adam(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.Adam, lr=0.01)
    for step in range(6):
        for optimizer in (plain, sharded):
            own = params_of(optimizer)
            set_grads(own, step)
            for index, p in enumerate(own):
                if (index + step) % 3 == 0 or index == 1:
                    p.grad = None
            optimizer.step()
        assert_same_bits(mine, params)
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:
        got, expected = sharded.state_dict(), plain.state_dict()
        assert 1 not in got["state"]
        assert_same_state(got, {**expected, "state": dict(sorted(expected["state"].items()))})


@on_ranks(4)
def test_more_ranks_than_parameters_train() -> None:
    params = make_params(((3, 3),))
    sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.AdamW, lr=0.1)
    train_both(torch.optim.AdamW(params, lr=0.1), sharded, 3)
    assert (len(sharded.owned_parameters()) == 1) == (dist.get_rank() == 0)
    assert (sharded.state_nbytes() > 0) == (dist.get_rank() == 0)
    sharded.consolidate_state_dict(to=dist.get_world_size() - 1)


@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_one_rank_runs_the_same_code(ranks1: Ranks, view: bool) -> None:
    ranks1.run(check_parity, "adamw", view)


@on_ranks(4)
def test_sub_groups_count_ranks_within_the_group() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    params = make_params(seed=rank % 2)
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, pairs[rank % 2], lr=0.01)
    train_both(plain, sharded, 5)
    sharded.consolidate_state_dict(to=1)
    if rank >= 2:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    else:
        with pytest.raises(NotConsolidatedError):
            sharded.state_dict()


@on_ranks(2)
def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train_both(plain, sharded, 3)
    assert model[2].weight is model[0].weight


@on_ranks(2)
def test_sparse_gradients_step() -> None:
    for optimizer_class, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.SparseAdam, {"lr": 0.1})):
        params = make_params(((10, 4), (6, 3)))
        mine = twin(params)
        plain = optimizer_class(params, **options)
        sharded = ZeroRedundancyOptimizer(mine, optimizer_class, **options)
        for step in range(3):
            for own in (params, mine):
                for p in own:
                    values = torch.full((2, p.shape[1]), 0.5 + step)
                    p.grad = torch.sparse_coo_tensor(
                        torch.tensor([[1, 3 + step % 2]]), values, p.shape, check_invariants=True
                    )
            plain.step()
            sharded.step()
            assert_same_bits(mine, params)


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_data_replaced_by_the_user_is_taken_over_or_refused(view: bool) -> None:
    params = make_params()
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.01)
    train_both(plain, sharded, 2)
    for own in (params, mine):
        for p in own:
            p.data = p.data * 2
    train_both(plain, sharded, 2, first=2)
    mine[0].data = mine[0].data.double()
    set_grads(mine[1:], 9)
    mine[0].grad = torch.zeros(mine[0].shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"became torch\.float64 .* it was torch\.float32"):
        sharded.step()


@on_ranks(2)
def test_autograd_notices_that_a_step_changed_parameters_on_every_rank() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
