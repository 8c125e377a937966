"""Wrong arguments, and ranks that differ, raise on every rank; nothing is half done."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from pool import Ranks, on_ranks
from training import (
    MATRICES,
    assert_equal_on_all_ranks,
    make_params,
    needs_muon,
    pair_of,
    params_of,
    set_grads,
    train_both,
    twin,
)
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.errors import mark_remote

AdamW = torch.optim.AdamW


@on_ranks(2)
@pytest.mark.parametrize("kind", ["order", "names", "dtype", "frozen", "lr"])
def test_a_difference_between_ranks_names_what_each_holds(kind: str) -> None:
    odd = dist.get_rank() == 1
    params = make_params(((4, 3), (5,)))
    names = ["w", "b"]
    options: dict[str, Any] = {"lr": 0.1}
    expected = kind
    if kind == "order":
        names = []
        params = make_params(((4, 3), (6, 2), (5,)) if odd else ((4, 3), (5,), (6, 2)))
        expected = (
            r"rank 0 has parameter 1 of group 0 \(shape \(5,\)\).*"
            r"rank 1 has parameter 1 of group 0 \(shape \(6, 2\)\)"
        )
    elif kind == "names":
        names = ["w", "bias" if odd else "b"]
        expected = r"rank 0 has parameter 'b' .*; rank 1 has parameter 'bias'"
    elif kind == "dtype":
        params[1].data = params[1].data.to(torch.bfloat16 if odd else torch.float32)
        expected = r"rank 0 has parameter 'b' .* torch.float32.*; rank 1 .* torch.bfloat16"
    elif kind == "frozen":
        params[0].requires_grad_(not odd)
        expected = "rank 0 has parameter 'w' .* trainable.*; rank 1 .* frozen"
    elif kind == "lr":
        options["lr"] = 0.2 if odd else 0.1
        expected = r"rank 0 has optimizer .*lr=0.1.*; rank 1 has optimizer .*lr=0.2"
    given: Any = list(zip(names, params, strict=True)) if names else params
    with pytest.raises(RankMismatchError, match=expected):
        ZeroRedundancyOptimizer(given, AdamW, **options)


@on_ranks(2)
def test_wrong_arguments_are_told_plainly() -> None:
    weight = make_params(((6, 4),))[0]
    lazy = nn.LazyLinear(3).weight
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        ([weight], AdamW, {"lrr": 0.1}, TypeError, "lrr"),
        ([weight], AdamW, {"bucket_cap_mb": 0.0}, ValueError, "number of MiB above 0"),
        ({weight}, AdamW, {}, TypeError, "ordered"),
        (AdamW, [weight], {"lr": 0.1}, TypeError, r"expected params first.*got AdamW"),
        (nn.Linear(2, 2), AdamW, {}, TypeError, r"such as model.parameters\(\).*got Linear"),
        ([lazy], AdamW, {}, TypeError, "run one forward pass"),
        ([nn.Parameter(torch.zeros(1).expand(4))], AdamW, {}, ValueError, "one place in memory"),
        ([weight, nn.Parameter(weight.data[2:4])], AdamW, {}, ValueError, "share memory"),
    ]
    for params, optimizer_class, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            ZeroRedundancyOptimizer(params, optimizer_class, **options)


@on_ranks(2)
@needs_muon
def test_what_the_class_refuses_on_one_rank_is_quoted_by_the_other() -> None:
    mixed = make_params(((6, 4), (3,)))  # the vector, which Muon refuses, lies on one rank
    with pytest.raises(ValueError, match=r"(rank 1: )?Muon only supports 2D parameters"):
        ZeroRedundancyOptimizer(mixed, torch.optim.Muon, lr=0.1)


@on_ranks(2)
def test_parameters_side_by_side_in_one_storage_train() -> None:
    flat = torch.arange(12.0)
    params = [nn.Parameter(flat[:4]), nn.Parameter(flat[4:12].view(2, 4))]
    mine = [nn.Parameter(p) for p in torch.arange(12.0).split([4, 8])]
    mine[1].data = mine[1].data.view(2, 4)
    sharded = ZeroRedundancyOptimizer(mine, AdamW, lr=0.1)
    train_both(AdamW(twin(params), lr=0.1), sharded, 3)


@on_ranks(2)
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was() -> None:
    plain, sharded = pair_of(AdamW, make_params(MATRICES), lr=0.1)
    train_both(plain, sharded, 1)
    new = make_params(((3, 3), (4,)), seed=4)
    with pytest.raises(ValueError, match="more than one parameter group"):
        sharded.add_param_group({"params": sharded.param_groups[0]["params"][:1]})
    with pytest.raises(RankMismatchError, match=r"shape \(3, 3\)"):
        sharded.add_param_group({"params": new[:1] if dist.get_rank() == 0 else make_params(((2, 2),))})
    assert len(sharded.param_groups) == 1
    train_both(plain, sharded, 1, first=1)
    good = make_params(((3, 3), (4, 5)), seed=4)
    plain.add_param_group({"params": good})
    sharded.add_param_group({"params": twin(good)})
    train_both(plain, sharded, 2, first=2)


@on_ranks(2)
def test_unfreezing_after_construction_is_agreed() -> None:
    """Both ranks unfreeze something in the frozen bucket, but not the same."""
    frozen = make_params(((2, 2), (5,)), seed=1)
    for p in frozen:
        p.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer([*frozen, *make_params(((3,),), seed=2)], AdamW, lr=0.1)
    frozen[0].requires_grad_(True)
    frozen[1].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RankMismatchError, match=r"which parameters are frozen: .*shape \(5,\)\) trainable"):
        sharded.step()
    frozen[1].requires_grad_(True)
    sharded.step()
    assert sharded.state_nbytes() == 0


@on_ranks(2)
@pytest.mark.parametrize("also", [False, True])
def test_a_failure_that_is_another_ranks_is_repeated_as_it_is_unless_a_rank_has_its_own(also: bool) -> None:
    rank, raised = dist.get_rank(), mark_remote(ValueError("rank 7: no"))
    expected = "^(rank 1: )?own$" if also and rank else "^rank 7: no$"
    with pytest.raises(ValueError, match=expected), failing_together(RankGroup.of(None)):  # noqa: PT012
        if rank == 0 or also:
            raise ValueError("own") if rank else raised


def test_without_a_process_group_the_call_to_make_is_named() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroRedundancyOptimizer(make_params(), AdamW, lr=0.1)


@on_ranks(4)
def test_a_rank_outside_the_group_is_told_so() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="not a member"):
            ZeroRedundancyOptimizer(make_params(), AdamW, pair, lr=0.1)


@on_ranks(2)
def test_ranks_in_different_agreements_raise() -> None:
    """Rank 1 says whether something failed, as in a call that it makes twice; rank 0 is in another call."""
    group, rank = RankGroup.of(None), dist.get_rank()
    for _ in range(1 + rank):
        with group.doing("build()"):
            pass
    counts = "times of build.*: 1 on rank 0 and 2 on rank 1"
    told = pytest.raises(RankMismatchError, match=rf"rank 0 is in call\(\), rank 1 is in call\(\); {counts}")
    with told, group.doing("call()"):
        if rank == 0:
            agree(group, ["a"], "something")
        with failing_together(group):
            pass
    assert group.all_gather_fixed(b"x") == [b"x", b"x"]  # nothing is left to be received


class OfOneRank(torch.optim.SGD):
    """On rank 1, it decays what has no gradient; rank 0 has another build of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        p.mul_(0.5)
        return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("is_added", [False, True])
def test_what_trials_show_on_one_rank_counts_on_all(is_added: bool) -> None:
    params = make_params(((6, 5), (7,), (8, 4), (9,)))
    for p in params[:2]:
        p.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(params[3:] if is_added else params, OfOneRank, lr=0.1)
    if is_added:
        sharded.add_param_group({"params": params[:3]})
    assert "not steppable in parts" in sharded.explain().traits[0]
    with pytest.raises(ValueError, match=r"another rank|have no gradient"):
        sharded.iteration.overlap()
    for step in range(3):
        set_grads(params, step)
        sharded.step()
        assert_equal_on_all_ranks(params)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def in_order(params: list[Parameter], order: str) -> Any:
    """On the last rank, in another order: two alike, or over two groups."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if order == "swapped" and is_last:
        params[0], params[2] = params[2], params[0]
    elif order == "groups":
        first = 2 if is_last else 0
        return [{"params": params[first : first + 1]}, {"params": params[2 - first : 3 - first], "lr": 0.2}]
    return params


def check_order(order: str) -> str:
    with pytest.raises(RankMismatchError, match="in another order: what rank") as caught:
        ZeroRedundancyOptimizer(in_order(list(make_model().parameters()), order), torch.optim.AdamW, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize("order", ["swapped", "groups"])
def test_parameters_alike_in_another_order_on_one_rank_are_refused_on_all(ranks3: Ranks, order: str) -> None:
    told = ranks3.run(check_order, order)
    assert len(set(told)) == 1
    assert "what rank 2 has as parameter" in told[0]
    assert "rank 0 has as parameter" in told[0]
    assert "named_parameters()" in told[0]


@on_ranks(2)
def test_an_added_group_in_another_order_is_refused_on_all() -> None:
    params = make_params(((5,), (4, 4), (4, 4)))
    sharded = ZeroRedundancyOptimizer(params[:1], torch.optim.AdamW, lr=0.1)
    more = params[1:] if dist.get_rank() == 0 else params[:0:-1]
    with pytest.raises(RankMismatchError, match="in another order"):
        sharded.add_param_group({"params": more})
    sharded.add_param_group({"params": params[1:]})
    plain = torch.optim.AdamW(twin(params), lr=0.1)
    train_both(plain, sharded, 2)


@on_ranks(2)
def test_ranks_that_start_differently_are_taken_as_they_are() -> None:
    params = make_params(((4, 4), (4, 4), (4, 4)), seed=dist.get_rank())
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
