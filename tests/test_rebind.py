"""An optimizer and a model outlive their process group: detached, and bound to another of any size."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuts import finely_cut
from ddp_pairs import SMALL_MB, mlp, mlp_loss
from pool import on_ranks
from survivors import SHAPES, adamw, assert_trained, fresh, several
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads, train, whole
from worlds import leave, world
from zero_optim import (
    LostStateError,
    NotConsolidatedError,
    RankMismatchError,
    ZeroRedundancyOptimizer,
    checkpoint,
)
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step


def joining(folder: Path, rank: int, number: int, make: Callable[..., Any]) -> ZeroRedundancyOptimizer:
    """The optimizer of a rank that comes new to a run: built in a world of its own, over other values."""
    with world(folder, f"new{rank} {number}", rank, [rank]):
        optimizer = fresh(make)
        with torch.no_grad():
            for param in params_of(optimizer):
                param.fill_(0.5)
        optimizer.detach()
    return optimizer


@on_ranks(3)
@pytest.mark.parametrize("make", [adamw, several])
def test_state_moves_to_new_owners_when_the_number_of_ranks_changes(
    tmp_path: Path, make: Callable[..., ZeroRedundancyOptimizer]
) -> None:
    sizes = (2, 3, 3)
    rank = leave()
    optimizer: ZeroRedundancyOptimizer | None = None
    with finely_cut():
        for number, size in enumerate(sizes):
            if rank >= size:
                optimizer = None
                continue
            if number and optimizer is None:
                optimizer = joining(tmp_path, rank, number, make)
            with world(tmp_path, f"round {number}", rank, range(size)):
                if optimizer is None:
                    optimizer = fresh(make)
                else:
                    optimizer.rebind()
                train(optimizer, 2 * number, 2 * number + 2)
                if number + 1 < len(sizes):
                    optimizer.detach()
                else:
                    assert_trained(optimizer, make, 2 * len(sizes))


@on_ranks(1, 2)
def test_a_detached_optimizer_shows_what_it_owns_and_refuses_what_needs_the_group() -> None:
    optimizer = fresh(adamw)
    params = params_of(optimizer)
    train(optimizer, 0, 2)
    owned = {param: optimizer.state[param]["exp_avg"].clone() for param in optimizer.owned_parameters()}
    optimizer.consolidate_state_dict(to=0)
    optimizer.detach()
    optimizer.detach()
    set_grads(params, 2)
    model = nn.Linear(2, 2)
    for call in (
        optimizer.step,
        lambda: optimizer.step(lambda: 0.0),
        lambda: optimizer.add_param_group({"params": list(model.parameters())}),
        optimizer.consolidate_state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.averaged_weights().__enter__(),
        optimizer.gather_parameters,
        optimizer.explain,
        optimizer.iteration.overlap,
        lambda: checkpoint.save("nowhere", optimizer=optimizer),
        lambda: ShardedDataParallel(model, optimizer),
        lambda: zero_step(optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"is detached: call rebind\(\)"):
            call()  # type: ignore[operator]
    with pytest.raises(TypeError, match="detached optimizer cannot be pickled"):
        pickle.dumps(optimizer)
    assert copy.deepcopy(optimizer).core.snapshot.age == 2
    optimizer.wait_for_gathers()
    assert len(optimizer.param_groups) == 1
    assert list(optimizer.state) == list(owned)
    for param, value in owned.items():
        assert torch.equal(optimizer.state[param]["exp_avg"], value)
    assert optimizer.owned_state().keys() == owned.keys()
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["state"].keys() == set(range(len(params)))
    else:
        with pytest.raises(NotConsolidatedError):
            optimizer.state_dict()
    optimizer.rebind()  # the group is still there
    with pytest.raises(RuntimeError, match="expected a detached optimizer"):
        optimizer.rebind()
    optimizer.zero_grad()
    train(optimizer, 2, 3)
    assert_trained(optimizer, adamw, 3)


@on_ranks(2)
def test_state_that_is_lost_or_of_different_moments_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    optimizer = fresh(adamw)
    train(optimizer, 0, 2)
    alone = dist.new_group([0]), dist.new_group([1])
    optimizer.detach()
    with pytest.raises(
        LostStateError, match=r"no rank of the new group has the state of parameter .*Go back"
    ):
        optimizer.rebind(alone[rank])
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    with pytest.raises(RankMismatchError, match=r"options of the optimizer: rank 0 has .*lr=0.5"):
        optimizer.rebind()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.core.snapshot.age += rank
    with pytest.raises(RankMismatchError, match=r"rank 0 after 2 steps or loads; rank 1 after 3"):
        optimizer.rebind()
    optimizer.core.snapshot.age -= rank
    with pytest.raises(TypeError, match="keep_state"):
        optimizer.rebind(keep_state=1 if rank else True)  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match="keep_state"):
        optimizer.rebind(keep_state=bool(rank))
    apart = adamw(make_params(SHAPES), process_group=alone[rank])
    train(apart, 0, 2)
    apart.detach()
    with pytest.raises(RankMismatchError, match=r"ranks 0 and 1 both hold parameter .* two runs"):
        apart.rebind()
    optimizer.rebind()
    train(optimizer, 2, 4)
    assert_trained(optimizer, adamw, 4)


@on_ranks(2)
def test_without_its_state_an_optimizer_is_as_new_and_loads() -> None:
    optimizer = fresh(several)
    optimizer.detach()
    optimizer.rebind()
    before = optimizer.state_dict()
    train(optimizer, 0, 2)
    other = fresh(several)
    assert_same_state(before, other.state_dict())
    train(other, 0, 2)
    optimizer.detach()
    optimizer.rebind(keep_state=False)  # as new, over the parameters as they are
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    optimizer.load_state_dict(whole(other))
    assert_same_bits(params_of(optimizer), params_of(other))
    for each in (optimizer, other):
        train(each, 2, 4)
    assert_same_bits(params_of(optimizer), params_of(other))
    assert_same_state(whole(optimizer), whole(other))


@on_ranks(2)
def test_lazy_gathers_and_changes_from_outside_outlive_the_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, master_dtype=torch.float32, gather_lazily=model
    )
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    optimizer.detach()
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0
    optimizer.rebind()
    assert model[0].weight[0, 0] == 3.0
    set_grads(list(model.parameters()), 1)
    optimizer.step()
    assert optimizer.core.engine.under_way
    model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert not optimizer.core.engine.under_way


@on_ranks(2)
def test_detaching_without_a_wait_gives_up_gathers_to_which_a_rank_does_not_come() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params, group = list(model.parameters()), dist.new_group()
    optimizer = adamw(params, process_group=group, gather_lazily=model)
    set_grads(params, 0)
    optimizer.step()
    optimizer.wait_for_gathers()
    if dist.get_rank() == 0:
        optimizer.step()
        assert optimizer.core.engine.under_way
    optimizer.detach(wait=False)
    assert not optimizer.core.engine.under_way
    with pytest.raises(RankMismatchError, match=r"rank 1 after 1 steps or loads|rank 0 after 2 steps"):
        optimizer.rebind()
    optimizer.rebind(keep_state=False)
    set_grads(params, 1)
    optimizer.step()
    optimizer.wait_for_gathers()


def interrupt(_: Tensor) -> None:
    raise KeyError


@on_ranks(2)
def test_a_step_that_broke_off_in_the_backward_pass_is_not_taken_for_state() -> None:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB)
    optimizer = adamw(list(model.parameters()))
    model.register_comm_hook(None, zero_step(optimizer))
    for number in range(2):
        mlp_loss(model, number).backward()
        optimizer.step()
    handle = model.module[0].weight.register_hook(interrupt)  # near the end of the pass
    with pytest.raises(KeyError):
        mlp_loss(model, 2).backward()
    handle.remove()
    optimizer.detach()
    model.detach()
    with pytest.raises(LostStateError, match=r"a step broke off on ranks 0, 1: .*Go back to a checkpoint"):
        optimizer.rebind()
    optimizer.rebind(keep_state=False)
    model.rebind()
    mlp_loss(model, 3).backward()
    optimizer.step()
