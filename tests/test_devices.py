"""Which device and which backend the library's own traffic uses, for groups of every kind; without a GPU."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from device_names import (
    CPU,
    CUSTOM,
    GLOO,
    GPU0,
    GPU3,
    META,
    MIXED,
    MPI,
    NCCL,
    PLAIN_ELSEWHERE,
    PLAIN_ON_GPU_HOST,
    XCCL,
    XPU1,
    tensor_on,
)
from pool import on_ranks
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.comm import collectives
from zero_optim.comm.agreement import failing_together
from zero_optim.comm.backends import (
    TRANSPORTS,
    as_lists,
    backend_for,
    backends_of,
    device_for_small_tensors,
    devices_of,
    parse_config,
    unserved,
)
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp import DistributedDataParallel
from zero_optim.ddp.reducer.reducer import Reducer


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


def test_parameters_that_can_be_read_once_are_kept_also_those_of_groups() -> None:
    linear = nn.Linear(2, 2)
    both = list(linear.parameters())
    assert list(as_lists(linear.parameters())) == both
    groups: Any = as_lists([{"params": linear.parameters(), "lr": 1.0}, {"params": both}])
    assert [list(group["params"]) for group in groups] == [both, both]
    assert devices_of(groups) == (CPU,)
    given = {"params": linear.parameters()}
    as_lists([given])
    assert list(given["params"]) == []  # ours now, but the caller's dict holds what it held
    assert list(as_lists(both)) == both


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
        optimizer.iteration.overlap()  # takes lanes
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


@on_ranks(2)
def test_a_backend_of_another_name_trains_as_gloo_does() -> None:
    with registered("testgloo", ["cpu"]):
        group = dist.new_group(backend="testgloo")
        ranks = RankGroup.of(group, nn.Linear(2, 2))
        assert ranks.backends == {"cpu": "testgloo"}
        assert (ranks.device, ranks.data_backend) == (CPU, "testgloo")
        for ours, plain in zip(trained(group, True), trained(None, False), strict=True):
            assert torch.equal(ours, plain)
        dist.destroy_process_group(group)


@on_ranks(1)
@pytest.mark.parametrize(("name", "takes_thread"), [("gloo", True), ("gloo2", False)])
def test_a_backend_whose_name_begins_with_gloo_is_another_one(name: str, takes_thread: bool) -> None:
    params = list(nn.Linear(2, 2).parameters())
    with mock.patch.object(dist, "get_backend_config", return_value=f"cpu:{name}"):
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        assert optimizer.iteration.overlap().takes_thread == takes_thread


def test_only_tensors_on_the_cpu_let_a_thread_step() -> None:
    lets = {
        kind: TRANSPORTS["gloo"]("gloo", torch.device(kind)).lets_threads for kind in ("cpu", "mps", "cuda")
    }
    assert lets == {"cpu": True, "mps": False, "cuda": False}


@on_ranks(1)
def test_the_backends_of_a_group_are_those_that_it_really_has() -> None:
    world: Any = dist.group.WORLD
    assert backends_of(world)["cpu"] == "gloo"
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,hpu:nothing"):
        assert "hpu" not in backends_of(world)  # configured, but not there
    with mock.patch.object(dist, "get_backend_config", return_value="gloo"):
        assert backends_of(world)["cpu"] == "gloo"  # there, but not configured


@on_ranks(1)
def test_after_a_plain_init_on_a_gpu_host_small_tensors_lie_with_the_parameters() -> None:
    with (
        mock.patch.object(collectives, "backends_of", return_value=parse_config(PLAIN_ON_GPU_HOST)),
        mock.patch.object(dist, "get_backend", return_value="undefined"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        assert RankGroup.of(None, GPU3).device == GPU3


@on_ranks(2)
def test_parameters_on_a_device_without_a_backend_are_refused_on_every_rank() -> None:
    def found(given: object) -> tuple[torch.device, ...]:
        return (GPU3,) if dist.get_rank() == 1 else devices_of(given)

    params = list(nn.Linear(2, 2).parameters())
    optimizer = ZeroRedundancyOptimizer(params[:1], torch.optim.SGD, lr=0.1)
    with (
        mock.patch.object(collectives, "backends_of", return_value={"cpu": "gloo"}),
        mock.patch.object(collectives, "devices_of", found),
    ):
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            Reducer(params)
        with pytest.raises(ValueError, match=r"on cuda:3, and the group has no backend for cuda tensors"):
            DistributedDataParallel(nn.Linear(2, 2))
    group = RankGroup.of(None)
    optimizer.core.ranks = replace(group, backends={"xpu": "xccl"} if group.rank else group.backends)
    with pytest.raises(ValueError, match="on cpu, and the group has no backend for cpu tensors"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1


@on_ranks(1)
def test_a_rank_whose_error_nobody_hears_of_raises_it_all_the_same() -> None:
    group = RankGroup.of(None)
    with (
        mock.patch.object(RankGroup, "all_gather_fixed", side_effect=RemoteRankError("no answer")),
        pytest.raises(ValueError, match="of mine"),
        failing_together(group),
    ):
        raise ValueError("of mine")


@on_ranks(1)
def test_a_group_that_is_unpickled_is_for_the_devices_to_which_the_parameters_come() -> None:
    file = io.BytesIO()
    torch.save(RankGroup.of(None, [CPU]), file)
    file.seek(0)
    assert RankGroup.of(None, [META]).data_devices == ()
    assert torch.load(file, map_location="meta", weights_only=False).data_devices == ()
