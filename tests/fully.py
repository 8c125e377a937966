"""Fully sharded models for tests, and how they train beside whole ones."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    PrecisionPolicy,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.shard.places import is_freed

NARROW = PrecisionPolicy(params=torch.bfloat16, gradients=torch.float32, outputs=torch.float32)
Loss = Callable[[Any, int], Tensor]


class Block(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks between a first and a last layer; ``how`` is the kind of activation checkpointing."""

    def __init__(self, width: int = 24, depth: int = 3, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, width)
        self.blocks: Any = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return self.last(x)


def on_meta(make: Callable[..., nn.Module], *args: Any) -> Any:
    with torch.device("meta"):
        return make(*args)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    return torch.randn(4, 8, generator=generator)


def loss_of(model: Any, step: int) -> Tensor:
    return model(batch(step)).float().square().mean()


def adamw(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **{"lr": 1e-2, **options})


def fully(model: Any = None, optimizer: Any = None, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Wrap a model, a tower by default, with its blocks as units."""
    model = Tower() if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    options.setdefault("units", getattr(model, "blocks", None))
    return FullyShardedDataParallel(model, optimizer, **options), optimizer


def fully_later(model: Any = None, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Wrap a model before its optimizer is built."""
    model = Tower() if model is None else model
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks], **options)
    return wrapped, adamw(wrapped)


def blocks_of(model: Any) -> list[nn.Module]:
    return [*model.blocks]


def both(
    model: nn.Module,
    units: Callable[[Any], Any] = blocks_of,
    of_fully: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[tuple[Any, ZeroRedundancyOptimizer]]:
    """Two wrappers of copies of a model, whole and fully sharded, each with its optimizer."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    one, other = adamw(first), adamw(second)
    of_fully = of_fully or {}
    if of_fully.get("accumulate") == "owner":  # the order of sums
        whole = ShardedDataParallel(first, one, **options)
    else:
        whole = DistributedDataParallel(first, **options)
    sharded = FullyShardedDataParallel(second, other, units=units(second), **of_fully, **options)
    return [(whole, one), (sharded, other)]


def train(
    model: Any,
    optimizer: Any,
    steps: int | range = 3,
    loss_of: Loss = loss_of,
    most: float | None = None,
    passes: int = 1,
) -> list[float]:
    """Train with ordinary steps, with gradients clipped to a norm if one is given; gives the losses."""
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        for number in range(passes):
            loss = loss_of(model, step + 10 * number)
            loss.backward()
        if most is not None:
            optimizer.clip_grad_norm_(most)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_alike(model: nn.Module, loss_of: Loss = loss_of, **options: Any) -> None:
    (whole, one), (sharded, other) = both(model, **options)
    assert train(sharded, other, loss_of=loss_of) == train(whole, one, loss_of=loss_of)
    assert_alike(sharded, whole)
    assert sharded.units.nbytes_live() == 0


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    """The parameters of two models, with or without wrappers, have the same bits."""
    for (name, _), value, want in zip(model.named_parameters(), whole(model), whole(other), strict=True):
        assert torch.equal(value, want), name


def whole(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters, whole."""
    is_sharded = any(map(is_freed, model.parameters()))
    with unsharded(model, writes=False) if is_sharded else nullcontext():
        return [param.detach().clone() for param in model.parameters()]


def assert_equal_everywhere(model: nn.Module) -> None:
    """Every rank has the bits of rank 0."""
    for param in whole(model):
        first = param.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(param, first)


def state_of(model: Any) -> dict[str, Any]:
    """A copy of a state dict of the model in a wrapper."""
    return copy.deepcopy(dict(getattr(model, "module", model).state_dict()))


def assert_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name].cpu(), value.cpu()), name
        else:
            assert got[name] == value, name
