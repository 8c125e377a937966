"""In gathers of ordinary steps, on gloo, each owner sends on a group of its own."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap import Setting, plain_step
from pool import on_ranks
from training import assert_same_bits, params_of, set_grads
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.shard import gathers

LARGE = [(300, 256)] * 7 + [(7,)]  # 2.2 MB
CAP = 0.3  # MiB, so that there are several buckets

pytestmark = pytest.mark.on_sockets("gathers need no groups of their own there")


def make(shapes: list[tuple[int, ...]] = LARGE, **options: Any) -> ZeroRedundancyOptimizer:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return ZeroRedundancyOptimizer(
        params, torch.optim.SGD, **{"lr": 0.1, "momentum": 0.9, "bucket_cap_mb": CAP, **options}
    )


def step(optimizer: ZeroRedundancyOptimizer, number: int = 0) -> None:
    set_grads(params_of(optimizer), number)
    optimizer.step()


@contextmanager
def broadcasts() -> Iterator[list[tuple[str, int]]]:
    """Give what is broadcast in the body: name of the group, and source."""
    sent: list[tuple[str, int]] = []
    real = dist.broadcast

    def noted(tensor: torch.Tensor, group: Any, async_op: bool, group_src: int) -> Any:
        sent.append((group.group_name, group_src))
        return real(tensor, group=group, async_op=async_op, group_src=group_src)

    with mock.patch.object(dist, "broadcast", noted):
        yield sent


def groups_used(optimizer: ZeroRedundancyOptimizer, number: int = 0) -> dict[int, set[str]]:
    """Step, and tell on which groups each owner sent."""
    with broadcasts() as sent:
        step(optimizer, number)
        optimizer.wait_for_gathers()
    return {owner: {name for name, source in sent if source == owner} for _, owner in sent}


def given_group() -> str:
    world = dist.group.WORLD
    return world.group_name


@on_ranks(2, 4)
def test_each_owner_sends_on_a_group_of_its_own() -> None:
    optimizer = make()
    first = groups_used(optimizer)
    assert first.keys() == set(range(dist.get_world_size()))
    assert all(len(names) == 1 for names in first.values()), first
    assert len(set.union(*first.values())) == dist.get_world_size()
    assert given_group() not in set.union(*first.values())
    assert groups_used(optimizer, 1) == first


def lane_names(optimizer: ZeroRedundancyOptimizer) -> set[str]:
    return set.union(*groups_used(optimizer).values())


@on_ranks(2)
def test_a_copy_takes_lanes_of_its_own() -> None:
    optimizer = make()
    names = lane_names(optimizer)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for other in copies:
        assert lane_names(other).isdisjoint({*names, given_group()})
    assert lane_names(optimizer) == names
    for other in copies:
        assert_same_bits(params_of(other), params_of(optimizer))


@on_ranks(2)
def test_gathers_beside_an_overlapped_step_do_not_use_its_lanes() -> None:
    """An overlapped step gathers on its lanes, from a thread; other gathers do not go there."""
    with mock.patch.object(gathers, "LANES_FROM_NBYTES", 0):
        model, optimizer = Setting("ours").build(overlap=True)
        with broadcasts() as overlapped:
            plain_step(model, optimizer, 0)
        with broadcasts() as ordinary:
            optimizer.gather_parameters()
    used, others = ({name for name, _ in sent} for sent in (overlapped, ordinary))
    lanes = optimizer.iteration.overlap().lanes.groups
    assert {lane.process_group.group_name for lane in lanes} <= used
    assert len(others) == 2
    assert others.isdisjoint({*used, given_group()})
