"""A sharded run gives the bits of the unsharded run: one table of rows, and what no row shows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cuts import cut_over
from parity import assert_rows, batches
from parity_runs import OPTIONS, Row
from pool import Pool, on_ranks
from training import (
    assert_same_bits,
    assert_same_state,
    make_params,
    pair_of,
    params_of,
    set_grads,
    sgd,
    train_both,
    twin,
)
from zero_optim import NotConsolidatedError, ZeroRedundancyOptimizer

BATCHES = batches()


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_runs_have_the_bits_of_runs_without_sharding(pool: Pool, rows: list[Row]) -> None:
    pool.run(OPTIONS[rows[0].option].size, assert_rows, rows)


@on_ranks(2)
def test_a_frozen_parameter_that_kept_its_gradient_moves_as_in_torch() -> None:
    plain, sharded = pair_of(torch.optim.SGD, make_params(((4, 4), (3,))), lr=0.1, momentum=0.9)
    train_both(plain, sharded, 2)
    for _ in range(3):
        for optimizer in (plain, sharded):
            for p in params_of(optimizer):
                p.requires_grad_(False)
            optimizer.step()
        assert_same_bits(params_of(sharded), params_of(plain))


@on_ranks(4)
def test_more_ranks_than_parameters_train() -> None:
    plain, sharded = pair_of(torch.optim.AdamW, make_params(((3, 3),)), lr=0.1)
    train_both(plain, sharded, 3)
    assert (len(sharded.owned_parameters()) == 1) == (dist.get_rank() == 0)
    assert (sharded.state_nbytes() > 0) == (dist.get_rank() == 0)
    sharded.consolidate_state_dict(to=dist.get_world_size() - 1)
    sgd(make_params(((0,),))).step()  # and more than elements


@on_ranks(4)
def test_sub_groups_count_ranks_within_the_group() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    params = make_params(seed=rank % 2)
    sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.AdamW, pairs[rank % 2], lr=0.01)
    plain = torch.optim.AdamW(params, lr=0.01)
    train_both(plain, sharded, 5)
    sharded.consolidate_state_dict(to=1)
    if rank >= 2:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    else:
        with pytest.raises(NotConsolidatedError):
            sharded.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_data_replaced_by_the_user_is_taken_over_or_refused(view: bool) -> None:
    plain, sharded = pair_of(torch.optim.AdamW, view=view, lr=0.01)
    train_both(plain, sharded, 2)
    mine = params_of(sharded)
    for p in (*params_of(plain), *mine):
        p.data = p.data * 2
    train_both(plain, sharded, 2, first=2)
    mine[0].data = mine[0].data.double()
    set_grads(mine[1:], 9)
    mine[0].grad = torch.zeros(mine[0].shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"became torch\.float64 .* it was torch\.float32"):
        sharded.step()


@on_ranks(2)
@pytest.mark.parametrize("build", [ZeroRedundancyOptimizer, cut_over], ids=["whole", "cut"])
def test_autograd_notices_that_a_step_changed_parameters_on_every_rank(build: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False))
    sharded = build(model.parameters(), torch.optim.SGD, lr=0.1)
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
