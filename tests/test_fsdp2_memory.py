"""Memory of a step on parameters of FSDP2: buckets on their way, nothing whole of the rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import built, shard
from own_classes import Small
from pool import on_ranks
from test_sharded_memory import LivingStorages
from zero_optim import ZeroRedundancyOptimizer

SIDE, COUNT = 128, 64


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT)])


class ByNorm(Small):
    """Steps whole tensors in place, and keeps one tensor of state."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p)).add_(p.grad)
        p.add_(mean, alpha=-group["lr"] / float(mean.norm()))


@on_ranks(2, 4)
def test_a_step_of_owners_holds_two_buckets_beside_shards_and_its_share_of_state() -> None:
    model = shard(built(Row))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), ByNorm, bucket_cap_mb=0.25, lr=0.1)
    buckets, size = optimizer.core.engine.buckets, dist.get_world_size()
    assert len(buckets) == 16 // size
    share = COUNT * SIDE * SIDE * 4 // size  # of the model, or of the state
    shards = [param.to_local() for param in model.parameters()]
    for _ in range(2):
        with LivingStorages(shards) as living:
            optimizer.step()
        assert share <= living.count() <= share + 1024  # the state alone stays
        # Of each of two buckets: rows of gradients and parameters, sent and received, and one of them whole.
        most = max(bucket.values.nbytes_to_gather for bucket in buckets)
        assert living.peak - share <= 2 * 3.5 * most + SIDE * SIDE * 4
