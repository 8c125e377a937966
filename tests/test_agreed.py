"""What ranks find out alone and must have in common: traits of a class, the order of unnamed parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from pool import Ranks, on_ranks
from training import assert_same_bits, make_params, params_of, set_grads, train_both, twin
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer

# ------------------------------------------------------------------ traits


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
@pytest.mark.parametrize("via", ["built", "added", "rebound"])
def test_what_trials_show_on_one_rank_counts_on_all(via: str) -> None:
    params = make_params(((6, 5), (7,), (8, 4), (9,)))
    for p in params[:2]:
        p.requires_grad_(False)
    first = params if via != "added" else params[3:]
    sharded = ZeroRedundancyOptimizer(first, OfOneRank, lr=0.1)
    if via == "added":
        sharded.add_param_group({"params": params[:3]})
    elif via == "rebound":
        group = dist.new_group()
        sharded.detach()
        sharded.rebind(group)
    assert "not steppable in parts" in sharded.explain(quiet=True).traits[0]
    with pytest.raises(ValueError, match=r"another rank|have no gradient"):
        sharded.iteration.overlap()
    for step in range(3):
        set_grads(params, step)
        sharded.step()
        for param in params:
            everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, param.detach())
            assert_same_bits(everyone, [everyone[0]] * len(everyone))


# ------------------------------------------------------------------ the order of parameters


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def in_order(params: list[Parameter], order: str) -> Any:
    """On the last rank, in another order: two alike, over two groups, or or ones and zeros."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if order == "swapped" and is_last:
        params[0], params[2] = params[2], params[0]
    elif order == "constants" and is_last:
        params[4], params[5] = params[5], params[4]
    elif order == "groups":
        first = 2 if is_last else 0
        return [{"params": params[first : first + 1]}, {"params": params[2 - first : 3 - first], "lr": 0.2}]
    return params


def check_order(order: str) -> str:
    with pytest.raises(RankMismatchError, match="in another order: what rank") as caught:
        ZeroRedundancyOptimizer(in_order(list(make_model().parameters()), order), torch.optim.AdamW, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize("order", ["swapped", "constants", "groups"])
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


KINDS = ["different", "partly different", "equal among themselves", "transposed", "bfloat16", "named"]


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_start_differently_are_taken_as_they_are(kind: str) -> None:
    rank = dist.get_rank()
    params = make_params(((4, 4), (4, 4), (4, 4)), seed=rank if kind == "different" else 0)
    if kind == "partly different" and rank:
        params[1].data.add_(1.0)
    elif kind == "equal among themselves":
        for param in params:
            param.data.fill_(rank)
    elif kind == "transposed":
        params = [Parameter(param.data.t()) for param in params]
    elif kind == "bfloat16":
        params = [Parameter(param.data.bfloat16()) for param in params]
    given: Any = params
    if kind == "named":  # names are compared, values are not read
        given = [(f"p{n}", params[n]) for n in range(3)]
        params[0].data, params[1].data = (params[rank].data.clone(), params[1 - rank].data.clone())
    optimizer = ZeroRedundancyOptimizer(given, torch.optim.SGD, lr=0.1)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
