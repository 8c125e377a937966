"""With parameters on their owners alone, a loop trains as with whole ones."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, unsharded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks between a first and a last layer; ``how`` is the kind of activation checkpointing."""

    def __init__(self, width: int = 24, depth: int = 3, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return self.last(x)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    return torch.randn(4, 8, generator=generator)


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def trains_alike(how: str, reshards: bool | int) -> None:
    model = Tower(how=how)
    whole, plain = DistributedDataParallel(copy.deepcopy(model)), copy.deepcopy(model)
    one = adamw(whole)
    optimizer = adamw(model)
    wrapped = FullyShardedDataParallel(
        model, optimizer, units=[*model.blocks], reshard_after_forward=reshards
    )
    assert all(param.isnan().all() for param in model.parameters())
    assert train(wrapped, optimizer) == train(whole, one)
    assert all(param.isnan().all() for param in model.parameters())
    with unsharded(model):
        for param, want in zip(model.parameters(), whole.module.parameters(), strict=True):
            assert torch.equal(param, want)
    assert wrapped.units.nbytes_live() == 0
    del plain


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("reshards", [True, False, 2])
def test_training_gives_the_bits_of_whole_parameters(ranks2: Ranks, how: str, reshards: bool | int) -> None:
    ranks2.run(trains_alike, how, reshards)
