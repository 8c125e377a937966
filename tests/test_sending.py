"""How a group sends what it is given: exchanges, lanes and rows, by the backend that serves the data."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from device_names import CPU, GPU0, GPU3, MIXED
from pool import on_ranks
from zero_optim.comm import lanes
from zero_optim.comm.backends import parse_config
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.comm.sending import exchange
from zero_optim.compat import autograd, private
from zero_optim.compat.autograd import coalesces, make_group, start_as_one

# ---------------------------------------------------------------------- exchanges and lanes


@pytest.mark.on_sockets("it is about backends")
@on_ranks(2)
def test_another_backend_exchanges_at_once_whatever_the_device() -> None:
    """Rank r receives r + 1 elements of each."""
    group = RankGroup.of(None)
    mine = group.rank + 1
    sent, came = torch.arange(3, dtype=torch.float32), torch.empty(2 * mine)
    started = mock.Mock(spec=dist.Work)
    with mock.patch.object(dist, "all_to_all_single", return_value=started) as asked:
        exchange([replace(group, backends={"cpu": "nccl"})], sent, [1, 2], came, [mine] * 2).wait()
    started.wait.assert_called_once_with()
    into, parcel, back, there = asked.call_args.args
    assert (into.data_ptr(), parcel.data_ptr()) == (came.data_ptr(), sent.data_ptr())
    assert (back, there) == ([4 * mine] * 2, [4, 8])  # bytes, as no backend has all dtypes


@on_ranks(2)
def test_lanes_have_the_backend_that_sends_the_data_and_are_many_on_gloo_alone() -> None:
    group, asked = RankGroup.of(None, nn.Linear(2, 2)), []

    def lease(group: RankGroup, number: int, backend: str) -> None:
        asked.append((number, backend))

    mixed = parse_config(MIXED)
    with mock.patch.object(lanes, "lease", lease):
        lanes_beside(group)
        lanes_beside(replace(group, backends=mixed))
        lanes_beside(replace(group, backends=mixed, data_devices=(GPU3,)))
        lanes_beside(replace(group, backends={"cpu": "mine"}))
        lanes_beside(replace(group, backends={}))  # a subclass of ProcessGroup: its name is all there is
    assert asked == [(2, "gloo"), (2, "gloo"), (1, "nccl"), (1, "mine"), (2, "gloo")]


# ---------------------------------------------------------------------- rows at once


class CoalescingGroup:
    """Records what a group is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.work = mock.Mock(spec=dist.Work)

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(f"start on {device}")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.calls.append(f"end on {device}")
        return self.work


def test_collectives_started_as_one_have_one_handle_and_are_ended_after_an_error_too() -> None:
    group: Any = CoalescingGroup()

    def fail() -> None:
        raise ValueError("wrong")

    with mock.patch.object(autograd, "coalesces", return_value=True):
        assert start_as_one(group, GPU3, [lambda: group.calls.append("collective")]) == [group.work]
        assert group.calls == ["start on cuda:3", "collective", "end on cuda:3"]
        with pytest.raises(ValueError, match="wrong"):
            start_as_one(group, GPU3, [fail])
        assert group.calls[-1] == "end on cuda:3"
        group.work = None  # nothing was started
        assert start_as_one(group, GPU3, []) == []


@pytest.mark.on_sockets("it is about backends")
@on_ranks(2)
def test_the_rows_of_a_bucket_are_one_launch_where_the_backend_can() -> None:
    group, log = RankGroup.of(None), []
    real = dist.broadcast

    def broadcast(row: Tensor, group_src: int, **options: Any) -> Any:
        log.append((row.dtype, row.numel(), group_src))
        return real(row, group_src=group_src, **options)

    def begin(process_group: dist.ProcessGroup, device: torch.device) -> None:
        log.append("start")

    def end(process_group: dist.ProcessGroup, device: torch.device) -> Any:
        log.append("end")
        return mock.Mock(spec=dist.Work)

    world: Any = dist.group.WORLD
    assert not coalesces(world, CPU)  # gloo
    rows = [(0, torch.ones(3)), (1, torch.ones(0)), (1, torch.ones(2, dtype=torch.int16))]
    with (
        mock.patch.object(autograd, "coalesces", return_value=True),
        mock.patch.object(private, "start_coalescing", begin),
        mock.patch.object(private, "end_coalescing", end),
        mock.patch.object(dist, "broadcast", broadcast),
    ):
        assert len(group.broadcast_rows(iter(rows))) == 1
        # An empty row takes part: every rank starts the same ones.
        whole = [(torch.uint8, 12, 0), (torch.uint8, 0, 1), (torch.uint8, 4, 1)]
        assert log == ["start", *whole, "end"]
        log.clear()
        assert len(group.broadcast_rows(rows[:1])) == 1
        assert log == whole[:1]  # one alone needs no more
        assert group.broadcast_rows([]) == []
    for work in group.broadcast_rows(rows):  # so that no rank ends while the other still waits
        work.wait()


# ---------------------------------------------------------------------- groups beside a bound one


class BoundGroup:
    """A group as PyTorch makes it beside a default group with ``device_id=``: to be split from that."""

    _device_types = (torch.device("cuda"),)

    def __init__(self) -> None:
        self.options = SimpleNamespace(split_from=object(), _timeout=None)
        self.group_name = "lane"

    def size(self) -> int:
        return 1

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(wrapped_pg=SimpleNamespace(options=self.options))


@on_ranks(1)
def test_a_lane_beside_a_bound_group_is_not_split_from_it() -> None:
    world: Any = dist.group.WORLD
    made = BoundGroup()
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", object, create=True),  # that of PyTorch before 2.15
        mock.patch.object(private, "new_process_group_helper", return_value=(made, None)) as helper,
    ):
        world.bound_device_id = GPU0
        try:
            assert make_group([0], "nccl", "lane", None) is made  # type: ignore[comparison-overlap]
        finally:
            world.bound_device_id = None
            c10d._world.pg_group_ranks.pop(made, None)  # type: ignore[call-overload]
    assert helper.call_args.kwargs.get("device_id") is None  # else it is split at once
    assert made.options.split_from is None  # else with its first collective


class LegacyNCCL:
    """The backend of PyTorch before 2.15, whose options those of the one after it are."""

    class Options:
        lazy_init, _timeout = False, None


@on_ranks(1)
@pytest.mark.parametrize("default", [LegacyNCCL, object])
def test_a_lane_of_the_newer_nccl_waits_for_its_first_collective_on_the_device_of_the_default_group(
    default: type,
) -> None:
    world: Any = dist.group.WORLD
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", LegacyNCCL, create=True),
        mock.patch.object(private, "new_process_group_helper", return_value=(BoundGroup(), None)) as helper,
        mock.patch.object(autograd, "backends_behind", return_value=[default()]),
    ):
        world.bound_device_id = GPU3
        try:
            made = make_group([0], "cpu:gloo,cuda:nccl", "lane", timedelta(seconds=7))
            make_group([0], "gloo", "lane", None)
        finally:
            world.bound_device_id = None
            c10d._world.pg_group_ranks.pop(made, None)
    nccl, gloo = (call.kwargs for call in helper.call_args_list)
    options = nccl["backend_options"]
    assert (options.lazy_init, options._timeout) == (True, timedelta(seconds=7))  # else it is split at once
    assert nccl["device_id"] == (None if default is LegacyNCCL else GPU3)  # else it guesses one
    assert (gloo["backend_options"], gloo["device_id"]) == (None, None)
