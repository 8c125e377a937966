"""Which device and which backend the library's own traffic uses, for groups of every kind; without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from device_names import CPU, GLOO, GPU3, MIXED, NCCL, PLAIN_ELSEWHERE, PLAIN_ON_GPU_HOST
from pool import on_ranks
from training import make_params, train_both, twin, whole
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import collectives
from zero_optim.comm.backends import backend_for, device_for_small_tensors, devices_of, parse_config, unserved
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp import DistributedDataParallel


@pytest.mark.parametrize(
    ("config", "data", "small", "lane"),
    [
        (PLAIN_ON_GPU_HOST, [GPU3], GPU3, "nccl"),
        (PLAIN_ELSEWHERE, [CPU], CPU, "gloo"),
        (MIXED, [GPU3], CPU, "nccl"),
        (MIXED, [CPU, GPU3], CPU, MIXED),
        (GLOO, [GPU3], CPU, "gloo"),
        (NCCL, [CPU, GPU3], GPU3, "nccl"),  # refused later, but by a message that arrives
    ],
)
def test_small_tensors_lie_on_the_cpu_if_it_has_a_backend_else_where_the_parameters_lie(
    config: str, data: list[torch.device], small: torch.device, lane: str
) -> None:
    backends = parse_config(config)
    assert device_for_small_tensors(backends, data) == small
    assert backend_for(backends, data) == lane


@pytest.mark.parametrize(
    ("config", "data", "says"),
    [
        (NCCL, [CPU], ["on cpu", "(it has cuda:nccl)", "to cuda", '"cuda:nccl,cpu:gloo"']),
        (PLAIN_ELSEWHERE, [CPU, GPU3], ["on cuda:3", "(it has cpu:gloo)", '"cpu:gloo,cuda:nccl"']),
        (NCCL, [GPU3], []),
        (GLOO, [GPU3], []),
    ],
)
def test_parameters_that_a_group_cannot_send_are_named_with_what_it_has_and_what_to_do(
    config: str, data: list[torch.device], says: list[str]
) -> None:
    wrong = unserved(parse_config(config), data)
    assert (wrong is None) == (not says)
    for part in says:
        assert part in str(wrong)


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


@on_ranks(2)
def test_a_backend_of_another_name_trains_as_gloo_does() -> None:
    with registered("testgloo", ["cpu"]):
        group = dist.new_group(backend="testgloo")
        ranks = RankGroup.of(group, nn.Linear(2, 2))
        assert ranks.backends == {"cpu": "testgloo"}
        assert (ranks.device, ranks.data_backend) == (CPU, "testgloo")
        params = make_params()
        sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.Adam, group, lr=0.1)
        sharded.iteration.overlap()  # takes lanes
        train_both(torch.optim.Adam(params, lr=0.1), sharded, 2)
        assert len(whole(sharded)["state"]) == len(params)
        dist.destroy_process_group(group)


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
            DistributedDataParallel(nn.Linear(2, 2))
    group = RankGroup.of(None)
    optimizer.core.ranks = replace(group, backends={"xpu": "xccl"} if group.rank else group.backends)
    with pytest.raises(ValueError, match="on cpu, and the group has no backend for cpu tensors"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
