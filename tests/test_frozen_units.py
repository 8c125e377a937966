"""Units with frozen parameters train with the same bits, and are freed in the backward pass as others are."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fully import assert_alike, both, train
from pool import on_ranks
from test_fully_sharded import Adapted
from zero_optim.ddp import FullyShardedDataParallel

WIDTH, NUM_BLOCKS = 24, 8


class Block(nn.Module):
    """Begins with a frozen layer, which the backward pass reads last; ends with one that is adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapted = Adapted(nn.Linear(WIDTH, WIDTH))
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.adapted(self.last(torch.tanh(self.first(x))))


class Tower(nn.Module):
    """Blocks that are called in some way."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 3)
        frozen = {"frozen": [1, 2, 5], "frozen first": [0, 1]}.get(kind, [])
        for number in frozen:
            self.blocks[number].requires_grad_(False)
        if kind == "frozen first":
            self.first.requires_grad_(False)

    def _two(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number + 1](self.blocks[number](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "pairs":
            for number in range(0, NUM_BLOCKS, 2):
                x = checkpoint(self._two, number, x, use_reentrant=False)
        for block in () if self.kind == "pairs" else self.blocks:
            if self.kind in ("reentrant", "checkpointed"):
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            elif self.kind == "by name":
                x = block(x=x, scale=0.5)
            elif self.kind == "in place":
                x = block(x.clone().mul_(1.0))
            else:
                x = block(x)
        if self.kind == "twice":
            x = self.blocks[0](x)
        return self.last(x)


class Live:
    """Counts the blocks that are whole, when a gradient has come.

    Attributes:
        most: at once, in blocks.
    """

    def __init__(self, wrapped: FullyShardedDataParallel) -> None:
        self.most = 0
        self._units = wrapped.units.units[1:]
        for param in wrapped.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        live = (any(bucket.is_whole for bucket in unit.buckets) for unit in self._units)
        self.most = max(self.most, sum(live))


KINDS = [
    "plain",
    "by name",
    "in place",
    "frozen",
    "frozen first",
    "twice",
    "checkpointed",
    "reentrant",
    "pairs",
]


@on_ranks(2)
def test_units_with_frozen_parameters_are_freed_when_their_inputs_have_gradients() -> None:
    for kind in KINDS:
        (whole, one), (fully, other) = both(Tower(kind))
        live = Live(fully)
        assert train(fully, other, 2) == train(whole, one, 2), kind
        assert_alike(fully, whole)
        assert fully.units.nbytes_live() == 0
        assert live.most <= 2 + (kind == "pairs"), kind
