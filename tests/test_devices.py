"""Which device and which backend the library's own traffic uses, for groups of every kind; without a GPU."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from pool import Ranks
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.checkpoint.content import RankContent, random_state, set_random_state
from zero_optim.checkpoint.names import Objects
from zero_optim.comm import collectives, copies, lanes, wire
from zero_optim.comm import ranks as comm_ranks
from zero_optim.comm.agreement import failing_together
from zero_optim.comm.backends import (
    backend_for,
    backends_of,
    device_for_small_tensors,
    devices_of,
    held,
    parse_config,
    unserved,
)
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.compat import streams
from zero_optim.compat.engine import coalesced, coalesces, make_group
from zero_optim.ddp import DistributedDataParallel
from zero_optim.ddp.reducer import Reducer
from zero_optim.hooks.order import LaterStage

CPU, META = torch.device("cpu"), torch.device("meta")
GPU0, GPU3, XPU1 = torch.device("cuda", 0), torch.device("cuda", 3), torch.device("xpu", 1)

# What `dist.get_backend_config` says after init_process_group() with these names.
PLAIN_ON_GPU_HOST, PLAIN_ELSEWHERE = "cuda:nccl", "cpu:gloo"
NCCL, XCCL, MIXED = "cuda:nccl", "xpu:xccl", "cpu:gloo,cuda:nccl"
GLOO, MPI, CUSTOM = "cpu:gloo,cuda:gloo", "cpu:mpi,cuda:mpi", "cpu:mine,cuda:mine"


@pytest.mark.parametrize(
    ("config", "data", "small", "lane"),
    [
        (PLAIN_ON_GPU_HOST, [GPU3], GPU3, "nccl"),
        (PLAIN_ELSEWHERE, [CPU], CPU, "gloo"),
        (NCCL, [GPU3, GPU0], GPU3, "nccl"),
        (XCCL, [XPU1], XPU1, "xccl"),
        (MIXED, [GPU3], CPU, "nccl"),
        (MIXED, [CPU], CPU, "gloo"),
        (MIXED, [CPU, GPU3], CPU, MIXED),
        (MIXED, [], CPU, MIXED),
        (GLOO, [GPU3], CPU, "gloo"),
        (GLOO, [CPU, GPU3], CPU, "gloo"),
        (MPI, [GPU3], CPU, "mpi"),
        (CUSTOM, [CPU], CPU, "mine"),
        ("privateuseone:mine", [torch.device("privateuseone", 2)], torch.device("privateuseone", 2), "mine"),
        (NCCL, [CPU, GPU3], GPU3, "nccl"),  # refused later, but by a message that arrives
        ("", [GPU3], CPU, ""),
    ],
)
def test_small_tensors_lie_on_the_cpu_if_it_has_a_backend_else_where_the_parameters_lie(
    config: str, data: list[torch.device], small: torch.device, lane: str
) -> None:
    backends = parse_config(config)
    assert device_for_small_tensors(backends, data) == small
    assert backend_for(backends, data) == lane


def test_the_current_device_is_asked_only_where_there_is_no_parameter_and_no_bound_device() -> None:
    with mock.patch.object(torch.cuda, "current_device", return_value=5) as asked:
        assert device_for_small_tensors({"cuda": "nccl"}, [GPU3], GPU0) == GPU3
        assert device_for_small_tensors({"cuda": "nccl"}, [], GPU0) == GPU0
        assert device_for_small_tensors({"cuda": "nccl"}, [CPU], GPU0) == GPU0
        assert asked.call_count == 0
        assert device_for_small_tensors({"cuda": "nccl"}, []) == torch.device("cuda", 5)


@pytest.mark.parametrize(
    ("config", "data", "says"),
    [
        (NCCL, [CPU], ["on cpu", "(it has cuda:nccl)", "to cuda", '"cuda:nccl,cpu:gloo"']),
        (PLAIN_ELSEWHERE, [CPU, GPU3], ["on cuda:3", "(it has cpu:gloo)", '"cpu:gloo,cuda:nccl"']),
        (XCCL, [GPU0], ["on cuda:0", "(it has xpu:xccl)", "to xpu"]),
        (NCCL, [GPU3], []),
        (MIXED, [GPU3, CPU], []),
        (GLOO, [GPU3], []),
        ("", [GPU3], []),
    ],
)
def test_parameters_that_a_group_cannot_send_are_named_with_what_it_has_and_what_to_do(
    config: str, data: list[torch.device], says: list[str]
) -> None:
    wrong = unserved(parse_config(config), data)
    assert (wrong is None) == (not says)
    for part in says:
        assert part in str(wrong)


def test_devices_are_those_of_parameters_wherever_they_are_held() -> None:
    one, other, nowhere = (tensor_on(device) for device in (GPU3, CPU, META))
    assert devices_of([one, other, one]) == (GPU3, CPU)
    assert devices_of([("name", one), nowhere]) == (GPU3,)
    assert devices_of([{"params": one, "lr": other}]) == (GPU3,)  # a learning rate is not sent
    assert devices_of(nn.Linear(2, 2)) == (CPU,)
    assert devices_of({"a": 1}.values()) == devices_of("text") == devices_of(None) == ()
    assert devices_of(iter([one])) == ()
    assert devices_of([GPU3, [GPU0]]) == (GPU3, GPU0)


def tensor_on(device: torch.device) -> Tensor:
    return mock.Mock(spec=Tensor, device=device)


def test_parameters_that_can_be_read_once_are_kept_also_those_of_groups() -> None:
    linear = nn.Linear(2, 2)
    both = list(linear.parameters())
    assert list(held(linear.parameters())) == both
    groups: Any = held([{"params": linear.parameters(), "lr": 1.0}, {"params": both}])
    assert [list(group["params"]) for group in groups] == [both, both]
    assert devices_of(groups) == (CPU,)
    given = {"params": linear.parameters()}
    held([given])
    assert list(given["params"]) == []  # ours now, but the caller's dict holds what it held
    assert list(held(both)) == both


def broken() -> Iterator[Tensor]:
    yield nn.Parameter(torch.ones(2))
    raise KeyError("lost")


def check_broken_generator() -> None:
    params = broken() if dist.get_rank() == 1 else nn.Linear(2, 2).parameters()
    with pytest.raises((KeyError, RemoteRankError), match="lost"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


def test_a_generator_of_parameters_that_raises_on_one_rank_raises_on_all(ranks2: Ranks) -> None:
    ranks2.run(check_broken_generator)


# ---------------------------------------------------------------------- real groups


@contextmanager
def registered(name: str, devices: list[str]) -> Iterator[None]:
    """Register a backend of another name that is gloo."""

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)  # type: ignore[attr-defined]

    dist.Backend.register_backend(name, make, devices=devices)
    try:
        yield
    finally:
        dist.Backend._plugins.pop(name.upper())
        dist.Backend.backend_list.remove(name)
        dist.Backend.backend_capability.pop(name)
        dist.Backend.backend_type_map.pop(name)
        delattr(dist.Backend, name.upper())


def trained(process_group: dist.ProcessGroup | None, sharded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group, lr=0.1, overlap_with_ddp=False
        )
        optimizer.overlap()  # takes lanes
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    if sharded:
        optimizer.consolidate_state_dict(to=None)
        assert len(optimizer.state_dict()["state"]) == 4
    return [param.detach().clone() for param in model.parameters()]


def check_custom_backend() -> None:
    with registered("testgloo", ["cpu"]):
        group = dist.new_group(backend="testgloo")
        ranks = RankGroup.of(group, nn.Linear(2, 2))
        assert ranks.backends == {"cpu": "testgloo"}
        assert (ranks.device, ranks.data_backend) == (CPU, "testgloo")
        for ours, plain in zip(trained(group, True), trained(None, False), strict=True):
            assert torch.equal(ours, plain)
        dist.destroy_process_group(group)


def test_a_backend_of_another_name_trains_as_gloo_does(ranks2: Ranks) -> None:
    ranks2.run(check_custom_backend)


def check_thread_of_backend(name: str, takes_thread: bool) -> None:
    params = list(nn.Linear(2, 2).parameters())
    with mock.patch.object(dist, "get_backend_config", return_value=f"cpu:{name}"):
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        assert optimizer.overlap().takes_thread == takes_thread


@pytest.mark.parametrize(("name", "takes_thread"), [("gloo", True), ("gloo2", False)])
def test_a_backend_whose_name_begins_with_gloo_is_another_one(
    ranks1: Ranks, name: str, takes_thread: bool
) -> None:
    ranks1.run(check_thread_of_backend, name, takes_thread)


def check_known_groups() -> None:
    world: Any = dist.group.WORLD
    assert backends_of(world)["cpu"] == "gloo"
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,hpu:nothing"):
        assert "hpu" not in backends_of(world)  # configured, but not there
    with mock.patch.object(dist, "get_backend_config", return_value="gloo"):
        assert backends_of(world)["cpu"] == "gloo"  # there, but not configured


def test_the_backends_of_a_group_are_those_that_it_really_has(ranks1: Ranks) -> None:
    ranks1.run(check_known_groups)


def check_undefined_on_gpu_host() -> None:
    with (
        mock.patch.object(comm_ranks, "backends_of", return_value=parse_config(PLAIN_ON_GPU_HOST)),
        mock.patch.object(dist, "get_backend", return_value="undefined"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        assert RankGroup.of(None, GPU3).device == GPU3


def test_after_a_plain_init_on_a_gpu_host_small_tensors_lie_with_the_parameters(ranks1: Ranks) -> None:
    ranks1.run(check_undefined_on_gpu_host)


def check_unserved_on_one_rank() -> None:
    def found(given: object) -> tuple[torch.device, ...]:
        return (GPU3,) if dist.get_rank() == 1 else devices_of(given)

    params = list(nn.Linear(2, 2).parameters())
    optimizer = ZeroRedundancyOptimizer(params[:1], torch.optim.SGD, lr=0.1)
    with (
        mock.patch.object(comm_ranks, "backends_of", return_value={"cpu": "gloo"}),
        mock.patch.object(comm_ranks, "devices_of", found),
    ):
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            Reducer(params)
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            DistributedDataParallel(nn.Linear(2, 2))
    group = RankGroup.of(None)
    optimizer._group = replace(group, backends={"xpu": "xccl"} if group.rank else group.backends)
    with pytest.raises(ValueError, match="on cpu, and the group has no backend for cpu tensors"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1


def test_parameters_on_a_device_without_a_backend_are_refused_on_every_rank(ranks2: Ranks) -> None:
    ranks2.run(check_unserved_on_one_rank)


def check_own_error_first() -> None:
    group = RankGroup.of(None)
    with (
        mock.patch.object(RankGroup, "all_gather_fixed", side_effect=RemoteRankError("no answer")),
        pytest.raises(ValueError, match="of mine"),
        failing_together(group),
    ):
        raise ValueError("of mine")


def test_a_rank_whose_error_nobody_hears_of_raises_it_all_the_same(ranks1: Ranks) -> None:
    ranks1.run(check_own_error_first)


# ---------------------------------------------------------------------- how to send


def pieces_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Rank r's piece has r + 1 elements, and that for rank 0 has none."""
    return [torch.full((to * 3,), 10.0 * rank + to, dtype=dtype) for to in range(2)]


def check_packed_exchange() -> None:
    group = RankGroup.of(None)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        sent = pieces_of(group.rank, dtype)
        into = [torch.empty_like(sent[group.rank]) for _ in range(2)]
        works, came = group._exchange_packed(sent, into, group)
        for work in works:
            work.wait()
        assert came[group.rank] is sent[group.rank]
        for rank in range(2):
            assert torch.equal(came[rank], pieces_of(rank, dtype)[group.rank]), (dtype, rank)


def test_gloo_exchanges_what_is_not_on_the_cpu_as_one_tensor_of_bytes(ranks2: Ranks) -> None:
    ranks2.run(check_packed_exchange)


def check_exchange_by_backend() -> None:
    group = RankGroup.of(None)
    sent = pieces_of(group.rank, torch.float32)
    started = mock.Mock(spec=dist.Work)
    with mock.patch.object(dist, "all_to_all", return_value=started) as asked:
        works, came = group.exchange(sent, [replace(group, backends={"cpu": "nccl"})])
    assert [work.handle for work in works] == [started]
    into, pieces = asked.call_args.args
    assert [part.numel() for part in pieces] == [0 if to == group.rank else to * 3 for to in range(2)]
    assert [part.numel() for part in into] == [0 if r == group.rank else group.rank * 3 for r in range(2)]
    assert came[group.rank] is sent[group.rank]


def test_another_backend_exchanges_at_once_whatever_the_device(ranks2: Ranks) -> None:
    ranks2.run(check_exchange_by_backend)


def check_lanes_by_backend() -> None:
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


def test_lanes_have_the_backend_that_sends_the_data_and_are_many_on_gloo_alone(ranks2: Ranks) -> None:
    ranks2.run(check_lanes_by_backend)


def check_lanes_know_the_data() -> None:
    group = RankGroup.of(None, GPU3)
    assert [lane.data_devices for lane in lanes_beside(group).groups] == [(GPU3,)]


def test_lanes_know_where_the_data_lie(ranks1: Ranks) -> None:
    ranks1.run(check_lanes_know_the_data)


def check_later_stage() -> None:
    world: Any = dist.group.WORLD
    for config, device, same in [(MIXED, GPU3, True), (XCCL, XPU1, True), (GLOO, CPU, False)]:
        with mock.patch.object(comm_ranks, "backends_of", return_value=parse_config(config)):
            stage = LaterStage.beside(world, device)
        assert (stage.lease.groups[0].process_group is world) == same, config


def test_what_follows_a_collective_has_a_group_of_its_own_unless_futures_are_queued_work(
    ranks1: Ranks,
) -> None:
    ranks1.run(check_later_stage)


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
    with coalesced(group, GPU3) as works:
        assert works == []
        group.calls.append("collective")
    assert works == [group.work]
    assert group.calls == ["start on cuda:3", "collective", "end on cuda:3"]
    with pytest.raises(ValueError, match="wrong"), coalesced(group, GPU3):
        raise ValueError("wrong")
    assert group.calls[-1] == "end on cuda:3"
    group.work = None  # nothing was started
    with coalesced(group, GPU3) as works:
        pass
    assert works == []


def check_rows_at_once() -> None:
    group, log = RankGroup.of(None), []
    real = dist.broadcast

    def broadcast(row: Tensor, source: int, **options: Any) -> Any:
        log.append((row.dtype, row.numel(), source))
        return real(row, source, **options)

    @contextmanager
    def one(process_group: dist.ProcessGroup, device: torch.device) -> Iterator[list[dist.Work]]:
        log.append("start")
        works: list[dist.Work] = []
        yield works
        log.append("end")
        works.append(mock.Mock(spec=dist.Work))

    world: Any = dist.group.WORLD
    assert not coalesces(world, CPU)  # gloo
    rows = [(0, torch.ones(3)), (1, torch.ones(0)), (1, torch.ones(2, dtype=torch.int16))]
    with (
        mock.patch.object(collectives, "coalesces", return_value=True),
        mock.patch.object(collectives, "coalesced", one),
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


def test_the_rows_of_a_bucket_are_one_launch_where_the_backend_can(ranks2: Ranks) -> None:
    ranks2.run(check_rows_at_once)


# ---------------------------------------------------------------------- groups beside a bound one


class BoundGroup:
    """A group as PyTorch makes it beside a default group with ``device_id=``: to be split from that."""

    _device_types = (torch.device("cuda"),)

    def __init__(self) -> None:
        self.options = SimpleNamespace(split_from=object(), _timeout=None)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(wrapped_pg=SimpleNamespace(options=self.options))


def check_not_split() -> None:
    world: Any = dist.group.WORLD
    made = BoundGroup()
    with mock.patch.object(c10d, "_new_process_group_helper", return_value=(made, None)) as helper:
        world.bound_device_id = GPU0
        try:
            assert make_group([0], "nccl", "lane", None) is made  # type: ignore[comparison-overlap]
        finally:
            world.bound_device_id = None
            c10d._world.pg_group_ranks.pop(made, None)  # type: ignore[call-overload]
    assert helper.call_args.kwargs.get("device_id") is None  # else it is split at once
    assert made.options.split_from is None  # else with its first collective


def test_a_lane_beside_a_bound_group_is_not_split_from_it(ranks1: Ranks) -> None:
    ranks1.run(check_not_split)


# ---------------------------------------------------------------------- threads, and copies to the host


class Recorder:
    """A device's module, and its contexts, that say in which order they were entered and left."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def _context(self, what: str) -> Iterator[None]:
        self.log.append(f"enter {what}")
        yield
        self.log.append(f"leave {what}")

    def device(self, device: torch.device) -> Any:
        return self._context(f"device {device}")

    def stream(self, stream: Any) -> Any:
        return self._context("stream")


def test_a_stream_is_used_within_its_device_so_that_a_thread_never_returns_to_device_0() -> None:
    module = Recorder()
    with streams.Accelerator(module).using(SimpleNamespace(device=GPU3)):
        pass
    assert module.log == ["enter device cuda:3", "enter stream", "leave stream", "leave device cuda:3"]


def test_a_device_whose_module_has_no_streams_is_taken_for_one_that_works_in_order() -> None:
    assert not streams.is_asynchronous(torch.device("mps"))
    assert streams.is_asynchronous(GPU3)
    given = torch.arange(6.0).reshape(2, 3).t()
    copy = streams.HostCopy(given).read()
    assert torch.equal(copy, given)
    assert (copy.stride(), copy.device) == (given.stride(), CPU)
    assert copy.data_ptr() != given.data_ptr()


class CountingAccelerator:
    """Takes the CPU for an asynchronous device; counts copies that the CPU has waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def host_tensor(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    def recorded_event(self, device: torch.device) -> Any:
        return self

    def synchronize(self) -> None:
        self.waits += 1


@contextmanager
def counting() -> Iterator[CountingAccelerator]:
    accelerator = CountingAccelerator()
    with mock.patch.object(streams, "accelerator_of", return_value=accelerator):
        yield accelerator


def test_a_save_in_the_background_waits_for_the_device_once_however_many_tensors() -> None:
    part = RankContent()
    given = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": [torch.ones(4, dtype=torch.bfloat16)] * 2}
    part.add("state", given)
    with counting() as accelerator:
        staged = part.staged()
    assert accelerator.waits == 1
    assert part.tensors.keys() == staged.tensors.keys()
    for key, tensor in part.tensors.items():
        assert torch.equal(tensor, staged.tensors[key])
        assert tensor.stride() == staged.tensors[key].stride()
        assert tensor.data_ptr() != staged.tensors[key].data_ptr()


def test_a_save_in_the_background_pins_one_piece_at_a_time_and_keeps_ordinary_memory() -> None:
    part, pinned = RankContent(), []
    part.add(
        "state", [torch.arange(15, dtype=torch.int16).reshape(3, 5).t(), torch.arange(7.0), torch.ones(0)]
    )
    with counting() as accelerator, mock.patch.object(copies, "PIECE_NBYTES", 16):
        make = accelerator.host_tensor
        accelerator.host_tensor = lambda like: pinned.append(make(like)) or pinned[-1]  # type: ignore[method-assign]
        staged = part.staged()
    assert [tensor.nbytes for tensor in pinned] == [16, 16, 16, 10]
    assert accelerator.waits == 4
    kept = {tensor.data_ptr() for tensor in pinned}
    for key, tensor in part.tensors.items():
        assert torch.equal(tensor, staged.tensors[key])
        assert tensor.stride() == staged.tensors[key].stride()
        assert staged.tensors[key].data_ptr() not in kept


def check_unpickled_elsewhere() -> None:
    file = io.BytesIO()
    torch.save(RankGroup.of(None, [CPU]), file)
    file.seek(0)
    assert RankGroup.of(None, [META]).data_devices == ()
    assert torch.load(file, map_location="meta", weights_only=False).data_devices == ()


def test_a_group_that_is_unpickled_is_for_the_devices_to_which_the_parameters_come(ranks1: Ranks) -> None:
    ranks1.run(check_unpickled_elsewhere)


def test_a_tensor_of_the_host_comes_to_a_device_by_way_of_pinned_memory() -> None:
    with mock.patch.object(streams, "to_device", return_value="pinned") as to_device:
        assert streams.brought_to(torch.ones(2), META) == "pinned"
        given = torch.ones(2, device=META)
        assert streams.brought_to(given, META) is given
        assert streams.brought_to(torch.ones(1), CPU).tolist() == [1.0]
    to_device.assert_called_once()


def test_the_random_state_is_that_of_the_parameters_device_not_of_the_current_one() -> None:
    cuda = {"is_available": True, "is_initialized": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8)}
    with mock.patch.multiple(
        torch.cuda, **{name: mock.Mock(return_value=value) for name, value in cuda.items()}
    ):
        for device, asked in [(GPU3, GPU3), (None, torch.device("cuda")), (XPU1, torch.device("cuda"))]:
            state = random_state(device)
            torch.cuda.get_rng_state.assert_called_with(asked)  # type: ignore[attr-defined]
            with mock.patch.object(torch.cuda, "set_rng_state") as setting:
                set_random_state(state, device)
            assert setting.call_args.args[1] == asked
    assert Objects(model=nn.Linear(2, 2)).device is None


def test_a_piece_of_many_tensors_is_brought_to_the_host_with_one_wait() -> None:
    parts = [torch.full((number,), number, dtype=torch.uint8) for number in range(4)]
    with counting() as accelerator:
        assert torch.equal(streams.HostCopy(*parts).read(), torch.cat(parts))
    assert accelerator.waits == 1
    assert torch.equal(streams.HostCopy(*parts).read(), torch.cat(parts))
    on_device = [tensor_on(GPU3), tensor_on(CPU)]
    with mock.patch.object(wire, "HostCopy") as copy:
        assert wire._joined(on_device, CPU) is copy.return_value.read.return_value
        assert wire._joined(parts[:1], CPU) is parts[0]
    copy.assert_called_once_with(*on_device)
