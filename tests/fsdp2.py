"""Models that FSDP2 shards, beside unsharded twins that step FSDP2's own gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_optimizer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from training import HAS_MUON
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.flow.schedule import Moment, Operation

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Lamb": (torch_optimizer.Lamb, {"lr": 0.01}),
    "Shampoo": (torch_optimizer.Shampoo, {"lr": 0.1}),
    "NovoGrad": (torch_optimizer.NovoGrad, {"lr": 0.01}),
}
MUON: Any = torch.optim.Muon if HAS_MUON else None


class Tower(nn.Module):
    """Matrices of odd heights, one lower than the ranks are many, vectors, and a frozen layer."""

    def __init__(self, bias: bool = True, frozen: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 7, bias), nn.Linear(7, 2, bias), nn.Linear(2, 5, bias)])
        self.still = nn.Linear(5, 5, bias)
        self.still.requires_grad_(not frozen)
        self.last = nn.Linear(5, 1, bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x + self.still(x))


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each module of a list, then the rest."""
    for child in model.modules():
        for unit in child if isinstance(child, nn.ModuleList) else ():
            fully_shard(unit, **options)
    return fully_shard(model, **options)


def recipes(optimizer: ZeroRedundancyOptimizer) -> set[str]:
    """Where parameters are stepped: as rows, or whole on their owners."""
    moves = (Operation.REDUCE in bucket.schedule[Moment.STEP] for bucket in optimizer.core.engine.buckets)
    return {"whole" if each else "rows" for each in moves}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def take_gradients(twin: nn.Module, model: nn.Module) -> None:
    """Give a twin FSDP2's own gradients, whole."""
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = None if param.grad is None else whole(param.grad).to(other.dtype)


def batch(step: int, shape: Sequence[int] = (8, 9)) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def train_beside(
    model: nn.Module,
    twin: nn.Module,
    optimizer: Optimizer,
    plain: Optimizer,
    steps: Sequence[int] = range(4),
    run: Callable[[nn.Module, int], None] = backward,
) -> None:
    """Train a sharded model, and its twin on the same gradients; weights have equal bits after each step."""
    for step in steps:
        run(model, step)
        take_gradients(twin, model)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        assert_equal(model, twin, f"after step {step}")


def assert_equal(model: nn.Module, twin: nn.Module, when: str = "") -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(param), other), f"{name} differs {when}"


def pair(
    make: Callable[[], nn.Module], optimizer_class: Any, sharding: Any = None, **options: Any
) -> tuple[nn.Module, nn.Module, ZeroRedundancyOptimizer, Optimizer]:
    """Build a sharded model and its twin, with an optimizer each; ``sharding``: options of `shard`."""
    model, twin = built(make), built(make)
    shard(model, **(sharding or {}))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    return model, twin, optimizer, optimizer_class(twin.parameters(), **options)
