"""Sparse gradients of cut parameters are refused on every rank, with what keeps parameters whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

from cuts import cut_over, cut_pair, finely_cut, sparse_gradient
from overlap import Embedder
from pool import on_ranks
from training import assert_same_bits, make_params, params_of, set_grads, twin
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

SHAPES = ((64, 4), (48, 8))
REFUSED = r"sparse, and the parameter is cut.*cuts=False.*\"cuts\": False"
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def give_sparse(params: list[nn.Parameter], step: int) -> None:
    for param in params:
        param.grad = sparse_gradient(param, step)


@on_ranks(2)
def test_a_step_is_refused_on_every_rank_before_anything_is_stepped() -> None:
    plain, sharded = cut_pair(make_params(SHAPES), SGD, options=MOMENTUM)
    mine = params_of(sharded)
    before = [param.detach().clone() for param in mine]
    give_sparse(mine, 0)
    for call in (sharded.step, lambda: sharded.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match=rf"parameter 0 of group 0 \(shape \(64, 4\)\) is {REFUSED}"):
            call()
    assert_same_bits(mine, before)
    assert not sharded.state_nbytes()
    for optimizer in (plain, sharded):
        set_grads(params_of(optimizer), 1)
        optimizer.step()
    assert_same_bits(mine, params_of(plain))


@on_ranks(2)
def test_a_group_can_be_kept_whole() -> None:
    mine = make_params(((4096, 16), (512, 16), (512, 16)))
    plain = SGD(twin(mine), **MOMENTUM)
    with finely_cut():
        groups = [{"params": mine[:1], "cuts": False}, {"params": mine[1:2]}]
        sharded = ZeroRedundancyOptimizer(groups, SGD, bucket_cap_mb=1e-4, **MOMENTUM)
        sharded.add_param_group({"params": mine[2:], "cuts": False})
    assert [len(pieces) for pieces in sharded.pieces().values()] == [1, 2, 1]
    assert all("cuts" not in group for group in sharded.param_groups)
    assert "(cuts=False)" in str(sharded.explain())
    for step in range(3):
        for optimizer in (plain, sharded):
            table, dense, last = params_of(optimizer)
            give_sparse([table, last], step)
            set_grads([dense], step)
            optimizer.step()
    assert_same_bits(mine, params_of(plain))
    sharded.consolidate_state_dict(to=0)


@on_ranks(2)
def test_cuts_of_a_group_are_checked_and_compared() -> None:
    params = make_params(SHAPES)
    with pytest.raises(RankMismatchError, match="cuts of groups"):
        ZeroRedundancyOptimizer([{"params": params, "cuts": dist.get_rank() == 0}], SGD, lr=0.1)
    wrong = {"params": params, **({"cuts": "no"} if dist.get_rank() == 0 else {})}
    with pytest.raises(TypeError, match="expected cuts to be True or False, got 'no'"):
        ZeroRedundancyOptimizer([wrong], SGD, lr=0.1)
    sharded = ZeroRedundancyOptimizer(params[:1], SGD, lr=0.1)
    with pytest.raises(RankMismatchError, match="cuts of groups"):
        sharded.add_param_group({"params": params[1:], "cuts": dist.get_rank() == 0})
    assert len(sharded.param_groups) == 1


@on_ranks(2)
def test_a_joined_rank_hears_of_the_refusal() -> None:
    """Rank 1 runs out of inputs, and has no gradients; rank 0 has sparse ones."""
    _, sharded = cut_pair(make_params(SHAPES), SGD, options=MOMENTUM)

    def train() -> None:
        with Join([sharded]):
            for step in range(1 + 2 * (dist.get_rank() == 0)):
                set_grads(params_of(sharded), step)
                if step:
                    give_sparse(params_of(sharded), step)
                sharded.step()
            sharded.zero_grad()

    with pytest.raises(ValueError, match=REFUSED):
        train()


def cut_sgd(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return cut_over(model.parameters(), SGD, **options)


class Table(Embedder):
    """Long enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 6, sparse=True)


def step_tokens(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randint(20, (4,), generator=generator)).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_sharded_gradients_are_refused_when_wrapped() -> None:
    for options in ({"lr": 0.1}, MOMENTUM):
        model = Table()
        with pytest.raises(ValueError, match=REFUSED):
            ShardedDataParallel(model, cut_sgd(model, **options))


@on_ranks(2)
def test_a_step_in_the_backward_pass_is_refused_on_every_rank() -> None:
    model = Table()
    optimizer = cut_sgd(model, **MOMENTUM)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, zero_step(optimizer))
    before = model.table.weight.detach().clone()
    with pytest.raises(ValueError, match=REFUSED):
        step_tokens(wrapped, optimizer, 0)
    assert torch.equal(model.table.weight, before)
