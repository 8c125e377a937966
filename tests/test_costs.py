"""What sharding costs: collectives a step, memory a rank, bytes that stay where they are."""

import io
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import Ranks, on_ranks
from training import make_params, pair_of, params_of, set_grads, train_both, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import GATHER
from zero_optim.step.built import BuiltOptimizer
from zero_optim.step.spec import GroupSpec, OptimizerSpec


def count_collectives(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Step once and count what goes through torch.distributed, by name."""
    counts: dict[str, int] = {}

    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    names = ("broadcast", "all_reduce", "all_gather", GATHER, "send", "recv", "isend", "irecv")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(counted(name))
        optimizer.step()
    return counts


@on_ranks(2, 4)
@pytest.mark.on_sockets("it counts what goes through the backend")
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_a_step_broadcasts_once_for_each_bucket_and_owner_and_gathers_a_header(view: bool) -> None:
    size = dist.get_world_size()
    header = {"isend": size - 1, "irecv": size - 1}
    params = [*make_params(((20, 30),) * 20), *make_params(((20, 30),) * 12, torch.bfloat16)]
    set_grads(params, 0)
    one = ZeroRedundancyOptimizer(params, torch.optim.AdamW, parameters_as_bucket_view=view)
    assert count_collectives(one) == {"broadcast": 2 * size, **header}  # a bucket for each dtype
    small = ZeroRedundancyOptimizer(
        twin(params), torch.optim.AdamW, parameters_as_bucket_view=view, bucket_cap_mb=10 * 600 * 4 / 2**20
    )
    set_grads(params_of(small), 0)
    # 20 fp32 parameters, ten a bucket; 12 bf16 ones fit in one. Every rank owns some of each.
    assert count_collectives(small) == {"broadcast": 3 * size, **header}
    frozen = [*twin(params)]
    for p in frozen[:20]:
        p.requires_grad_(False)
    half = ZeroRedundancyOptimizer(frozen, torch.optim.AdamW, parameters_as_bucket_view=view)
    set_grads(frozen, 0)
    assert count_collectives(half) == {"broadcast": size, **header}
    for p in frozen:
        p.requires_grad_(True)
    assert count_collectives(half) == {"broadcast": 2 * size, GATHER: 1, **header}  # the ranks agree, once
    assert count_collectives(half) == {"broadcast": 2 * size, **header}


def measured_state() -> tuple[int, int, int]:
    """Bytes of state on this rank, of the unsharded run, and of the largest parameter's state."""
    params = make_params([(64, 48)] * 5 + [(100,)] * 7 + [(256, 32)], seed=3)
    plain, sharded = pair_of(torch.optim.AdamW, params, lr=0.1)
    assert sharded.state_nbytes() == 0
    train_both(plain, sharded, 2)
    assert set(sharded.state) == set(sharded.owned_parameters())
    each = [sum(v.untyped_storage().nbytes() for v in of.values()) for of in plain.state.values()]
    return sharded.state_nbytes(), sum(each), max(each)


def test_state_memory_is_shared_out_evenly_and_counted_nowhere_twice(ranks_2_and_4: Ranks) -> None:
    held = ranks_2_and_4.run(measured_state)
    unsharded, largest = held[0][1:]
    assert sum(nbytes for nbytes, _, _ in held) == unsharded
    mean = unsharded / ranks_2_and_4.size
    assert max(nbytes for nbytes, _, _ in held) <= max(1.1 * mean, largest)


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_parameters_are_views_of_a_bucket_or_stay_where_they_are(view: bool) -> None:
    params = make_params(((30, 20), (10,), (40, 5)))
    addresses = [p.data_ptr() for p in params]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, parameters_as_bucket_view=view, lr=0.1)
    moved = [p.data_ptr() for p in params]
    storages = {p.untyped_storage().data_ptr() for p in params}
    assert (moved == addresses) != view
    assert len(storages) == len(params)
    assert all(p.data_ptr() % 64 == 0 for p in params)
    set_grads(params, 0)
    optimizer.step()
    assert [p.data_ptr() for p in params] == moved


def check_explained() -> str:
    params = [*make_params(((64, 48), (64,), (32, 16)), torch.bfloat16), *make_params(((10, 10),), seed=1)]
    params[1].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)
    set_grads(params, 0)
    optimizer.step()
    with redirect_stdout(io.StringIO()) as printed:
        told = optimizer.explain()
    assert printed.getvalue() == ""
    assert repr(told) == str(told)
    mine = told.ranks[dist.get_rank()]
    assert mine.num_params == len(optimizer.owned_parameters())
    assert mine.state_nbytes == optimizer.state_nbytes()
    assert sum(rank.numel for rank in told.ranks) == sum(p.numel() for p in params)
    assert sum("frozen" in line for line in told.buckets) == 1
    assert count_collectives(optimizer).get("broadcast", 0) == told.collectives_per_step
    assert told.balance >= 1
    return str(told)


@pytest.mark.on_sockets("it counts what goes through the backend")
def test_explain_tells_what_is_held_the_same_on_every_rank(ranks: Ranks) -> None:
    texts = ranks.run(check_explained)
    assert len(set(texts)) == 1
    assert "collectives a step" in texts[0]
    assert "1 bfloat16 on cpu" in texts[0]


class Counted(list[Tensor]):
    """A list that counts how often it is gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_passes += 1
        return super().__iter__()


def test_a_step_of_some_parameters_goes_through_no_group() -> None:
    """As the step during the backward pass takes one for each bucket."""
    params = [torch.zeros(1, requires_grad=True) for _ in range(5)]
    for param in params:
        param.grad = torch.ones(1)
    given = GroupSpec(OptimizerSpec(torch.optim.SGD, {"lr": 1.0}), {}, may_cut=True)
    built = BuiltOptimizer({0: given}, [{"params": params}], is_tried=False)
    (group,) = built.optimizer.param_groups
    group["params"] = members = Counted(params)
    built.step({params[3]})
    members.num_passes = 0
    built.step({params[4], params[1]})
    assert members.num_passes == 0
    assert [param.item() for param in params] == [0, -1, 0, -1, -1]
    group["params"] = params[:2]  # as after a change of the public group
    built.step(set(params))
    assert [param.item() for param in params] == [-1, -2, 0, -1, -1]
