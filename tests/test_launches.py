"""On thousands of ranks a step starts no more kernels than on eight, and the collectives of docs/scale.md.

Counted on one rank over PyTorch's fake process group. Rows of the model's weights have odd lengths, so that
the pieces of a gradient do not adjoin in the rows to be sent.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step
from zero_optim.plan import cuts

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from fake_wire import Count, Wire

FEW, MANY = 8, 4096
OPTIONS: dict[str, Any] = {"lr": 0.1, "foreach": True}
CAP_MB = 0.1  # a bucket for each weight
# The most collectives of B buckets or units: sums, gathers, stamps, clipping.
MOST: dict[str, Callable[[int], int]] = {
    "stage 1": lambda buckets: buckets + 2 * buckets + 1 + 1,
    "stage 2": lambda buckets: 2 * buckets + 2 * buckets + 1 + 1,
    "stage 3": lambda units: 2 * units + 3 * (2 * units - 1) + 1,  # each gather has stamps
    "zero_step": lambda buckets: buckets + 2 * buckets + 1 + 1,  # it asks who failed, and does not clip
}


def training(stage: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(50, 400), nn.Linear(400, 50)) for _ in range(3)]
    net = nn.Sequential(*blocks, nn.Linear(50, 200))
    wrapped: nn.Module = net
    if stage == "stage 3":
        wrapped = FullyShardedDataParallel(net, units=blocks)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, bucket_cap_mb=CAP_MB, **OPTIONS)
    if stage == "stage 2":
        wrapped = ShardedDataParallel(net, optimizer)
    elif wrapped is net:
        wrapped = ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=True)
        if stage == "zero_step":
            ddp.register_comm_hook(None, zero_step(optimizer))

    def step() -> ZeroRedundancyOptimizer:
        wrapped(torch.ones(2, 50)).square().mean().backward()
        if stage != "zero_step":
            optimizer.clip_grad_norm_(1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return step


def counted(stage: str, size: int) -> tuple[int, int, int, int]:
    """Launches and collectives of a step, the optimizer's buckets, and the rows in them."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    wire = Wire()
    with mock.patch.object(cuts, "MIN_ROW_NBYTES", 256), wire.instead():
        step = training(stage)
        step()
        step()
        wire.collectives.clear()
        with Count() as count:
            optimizer = step()
    buckets = optimizer.core.engine.buckets
    num_collectives = (count.collectives + wire.collectives).total()
    return count.launches, num_collectives, len(buckets), sum(len(each.layout.rows) for each in buckets)


@pytest.mark.parametrize("stage", MOST)
def test_launches_and_collectives_do_not_grow_with_the_ranks(stage: str, ranks1: Ranks) -> None:
    (few,), (many,) = (ranks1.run(counted, stage, size) for size in (FEW, MANY))
    assert many[3] > 10 * few[3], "the ranks do not own smaller rows"
    assert many[0] <= few[0]  # perhaps fewer: the rank owns rows of fewer buckets
    assert few[1] <= many[1] <= MOST[stage](many[2])
