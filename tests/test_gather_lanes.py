"""Gathers of ordinary steps: on gloo each owner sends on a group of its own, elsewhere in one launch."""

import copy
import gc
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
from pool import Ranks, on_ranks
from training import assert_same_bits, params_of, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import backends, collectives
from zero_optim.comm.backends import TRANSPORTS, Transport
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import host_lanes_beside
from zero_optim.shard import engine, gathers

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
    assert world is not None
    return world.group_name


# ---------------------------------------------------------------------- who gets lanes


@on_ranks(2, 4)
def test_each_owner_sends_on_a_group_of_its_own() -> None:
    optimizer = make()
    first = groups_used(optimizer)
    assert first.keys() == set(range(dist.get_world_size()))
    assert all(len(names) == 1 for names in first.values()), first
    assert len(set.union(*first.values())) == dist.get_world_size()
    assert given_group() not in set.union(*first.values())
    assert groups_used(optimizer, 1) == first


@on_ranks(2)
@pytest.mark.parametrize("shapes", [[(8, 8)] * 4, [(600, 600)]], ids=["little to send", "one owner"])
def test_no_group_is_made_where_it_gains_nothing(shapes: list[tuple[int, ...]]) -> None:
    with mock.patch.object(engine, "host_lanes_beside") as taken:
        used = groups_used(make(shapes, cuts=False))
    assert set.union(*used.values()) == {given_group()}
    taken.assert_not_called()


@on_ranks(2)
@pytest.mark.not_late("it shows what other backends do")
def test_other_backends_and_devices_have_one_communicator() -> None:
    with mock.patch.dict(TRANSPORTS, gloo=Transport):
        test_no_group_is_made_where_it_gains_nothing(LARGE)
    with mock.patch.object(backends, "is_asynchronous", return_value=True):  # gloo and CUDA
        test_no_group_is_made_where_it_gains_nothing(LARGE)


@on_ranks(2)
def test_no_group_is_made_before_it_is_needed() -> None:
    with mock.patch.object(engine, "host_lanes_beside") as taken:
        make()
    taken.assert_not_called()


# ---------------------------------------------------------------------- the same bits


@on_ranks(2, 4)
@pytest.mark.parametrize("lazily", [False, True], ids=["at once", "lazily"])
@pytest.mark.parametrize("as_view", [True, False], ids=["view", "packed"])
def test_parameters_are_those_of_the_unsharded_run(as_view: bool, lazily: bool) -> None:
    options = {"parameters_as_bucket_view": as_view}
    optimizer = make(**options)
    mine = params_of(optimizer)
    theirs = twin(mine)
    plain = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    if lazily:
        optimizer.gather_lazily(nn.ParameterList(mine))  # type: ignore[arg-type]
    for number in range(3):
        set_grads(theirs, number)
        plain.step()
        assert given_group() not in set.union(*groups_used(optimizer, number).values())
        assert_same_bits(mine, theirs, number)
    optimizer.gather_parameters()
    assert_same_bits(mine, theirs)


# ---------------------------------------------------------------------- whose lanes they are


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


@on_ranks(2)
def test_lanes_are_handed_on_when_the_optimizer_goes() -> None:
    names = lane_names(make())
    gc.collect()
    assert lane_names(make()) == names


@on_ranks(2)
def test_lanes_on_which_a_gather_failed_are_not_lent_again() -> None:
    optimizer = make()
    names = lane_names(optimizer)
    with (
        mock.patch.object(RankGroup, "broadcast_rows", side_effect=ConnectionError),
        pytest.raises(ConnectionError),
    ):
        step(optimizer, 1)
    del optimizer
    gc.collect()
    others = {lane.process_group.group_name for lane in host_lanes_beside(RankGroup.of(None)).groups}
    assert others.isdisjoint(names)


# ---------------------------------------------------------------------- how many at once


@on_ranks(2)
@pytest.mark.parametrize("as_view", [True, False])
def test_gathers_under_way_take_no_memory_or_that_of_four_large_buckets(as_view: bool) -> None:
    """Views take none, so all are under way at once; copies of several large buckets and a small one do."""
    shapes = [*[(64, 64)] * 6, *[(8,)] * 8]
    optimizer = make(shapes, bucket_cap_mb=64 * 64 * 4 / 2**20, parameters_as_bucket_view=as_view)
    under_way: list[bool] = []
    most = [0, 0]
    start = engine.start_gather

    def noted(lanes: Any, bucket: Any, stamps: Any) -> Any:
        pending, is_large = start(lanes, bucket, stamps), bucket.layout.numel >= 64 * 64
        under_way.append(is_large)
        most[:] = max(most[0], sum(under_way)), max(most[1], len(under_way))
        then = pending.then

        def over() -> None:
            under_way.remove(is_large)
            then()

        pending.then = over
        return pending

    with mock.patch.object(engine, "start_gather", noted):
        step(optimizer)
    assert not under_way
    assert len(optimizer.core.engine.buckets) > 6
    assert most[0] == (6 if as_view else 4)
    if as_view:
        assert most[1] == len(optimizer.core.engine.buckets)


# ---------------------------------------------------------------------- where a bucket is one launch


def launches() -> tuple[int, int]:
    """How many launches a step takes where broadcasts coalesce, and how many buckets there are."""
    started = 0

    @contextmanager
    def one(*_: object) -> Iterator[list[dist.Work]]:
        nonlocal started
        started += 1
        handles: list[dist.Work] = []
        yield handles
        so_far = tuple(works)
        handles.append(mock.Mock(spec=dist.Work, wait=lambda: [work.wait() for work in so_far]))

    optimizer = make([(100, 128)] * 16)  # every rank owns a part of every bucket
    set_grads(params_of(optimizer), 0)
    works: list[Any] = []
    real = dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        works.append(real(*args, **kwargs))
        return works[-1]

    with (
        mock.patch.dict(TRANSPORTS, gloo=Transport),
        mock.patch.object(collectives, "coalesces", return_value=True),
        mock.patch.object(collectives, "coalesced", one),
        mock.patch.object(dist, "broadcast", broadcast),
    ):
        optimizer.step()
    assert len(works) > started  # several owners in a bucket
    return started, len(optimizer.core.engine.buckets)


def test_a_step_launches_as_often_with_four_ranks_as_with_two(ranks2: Ranks, ranks4: Ranks) -> None:
    found = {*ranks2.run(launches), *ranks4.run(launches)}
    assert len(found) == 1
    num_launches, num_buckets = found.pop()
    assert num_launches == num_buckets > 1
