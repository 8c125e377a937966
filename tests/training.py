"""For tests on several ranks: small parameter sets, fixed gradients, and comparisons.

Every function depends only on its arguments. So each rank can also make the unsharded run, and compare bits
without communication.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_optim import ZeroRedundancyOptimizer

MIXED = ((6, 5), (7,), (4, 3, 3, 3), (), (12, 2), (1,), (3, 8), (5,))
MATRICES = ((6, 5), (8, 8), (2, 9), (12, 4), (3, 7))

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])  # such as (2, 13)

HAS_MUON = hasattr(torch.optim, "Muon")  # PyTorch 2.8 does not have it yet
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="this PyTorch does not have torch.optim.Muon yet")


def make_params(
    shapes: Sequence[tuple[int, ...]] = MIXED, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Parameter]:
    """Parameters with fixed random values."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twin(params: Sequence[Tensor]) -> list[Parameter]:
    """Separate parameters with the same values, strides and trainability."""
    return [Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in params]


def set_grads(params: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    """Give every trainable parameter the gradient of one step, equal on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = grad.to(p.device, p.dtype) if p.requires_grad else None


def assert_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor], when: object = "") -> None:
    """Compare parameters bit for bit."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"parameter {index} differs {when}: {a} and {b}"


def assert_equal_on_all_ranks(params: Iterable[Tensor], when: object = "") -> None:
    """Compare parameters with those of rank 0, bit for bit."""
    for index, param in enumerate(params):
        other = param.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, param), f"parameter {index} differs between ranks {when}"


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two state dicts."""
    for part in ("param_groups", "state"):
        assert_same_value(got[part], expected[part], part)


def assert_same_value(got: Any, expected: Any, where: object = "") -> None:
    """Compare nested values: types, containers, and bits, strides and layouts of tensors."""
    assert type(got) is type(expected), (where, got, expected)
    if isinstance(expected, Tensor):
        assert (got.dtype, got.shape, got.layout) == (expected.dtype, expected.shape, expected.layout), where
        if expected.layout == torch.strided:
            assert got.stride() == expected.stride(), where
        assert torch.equal(got.to_dense(), expected.to_dense()), (where, got, expected)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key, part in expected.items():
            assert_same_value(got[key], part, (where, key))
    elif isinstance(expected, list | tuple):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same_value(one, other, (where, index))
    else:
        assert got == expected, (where, got, expected)


class LoRA(nn.Module):
    """A frozen layer, and a product of two small matrices beside it, which train."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def agreeing_scaler(device: str = "cpu", **options: Any) -> torch.amp.GradScaler:
    """PyTorch's scaler for shards, which hears of infinities on other ranks.

    The default of its ``process_group`` is the group that there is when its module is imported, which would
    never end: so that is none.
    """
    with mock.patch.object(type(dist.group), "WORLD", None):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # slow, hence here

    return ShardedGradScaler(device, process_group=dist.group.WORLD, **options)


def train_both(
    plain: Optimizer, sharded: Optimizer, steps: int, first: int = 0, after: Callable[[], None] | None = None
) -> None:
    """Step an unsharded and a sharded optimizer in turns, and compare parameters after every step."""
    for step in range(first, first + steps):
        for optimizer in (plain, sharded):
            set_grads(params_of(optimizer), step)
            optimizer.step()
        if after is not None:
            after()
        assert_same_bits(params_of(sharded), params_of(plain), f"after step {step}")


def train(optimizer: ZeroRedundancyOptimizer, first: int, last: int) -> None:
    """Take some steps, each with gradients and a learning rate of its own."""
    for step in range(first, last):
        set_grads(params_of(optimizer), step)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    optimizer.zero_grad()


def whole(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The whole state dict; all ranks call."""
    optimizer.consolidate_state_dict(to=None)
    return optimizer.state_dict()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def pair_of(
    optimizer_class: Callable[..., Optimizer],
    params: Sequence[Tensor] | None = None,
    view: bool = True,
    **options: Any,
) -> tuple[Any, ZeroRedundancyOptimizer]:
    """An unsharded optimizer and a sharded one over equal parameters."""
    own = make_params() if params is None else list(params)
    sharded = ZeroRedundancyOptimizer(twin(own), optimizer_class, parameters_as_bucket_view=view, **options)
    return optimizer_class(own, **options), sharded


def adamw_pair() -> tuple[torch.optim.AdamW, ZeroRedundancyOptimizer]:
    """An unsharded and a sharded AdamW over equal parameters."""
    return pair_of(torch.optim.AdamW, lr=0.01)


def sgd(params: Sequence[Tensor] | None = None, **options: Any) -> ZeroRedundancyOptimizer:
    """A sharded SGD."""
    own = make_params() if params is None else params
    return ZeroRedundancyOptimizer(own, torch.optim.SGD, **{"lr": 0.1, **options})
