"""For the tests of sharded gradients: the same run with whole gradients, and with sharded ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cuts import ONE_A_BUCKET, cutting
from overlap import Net, adamw
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.plan.pieces import Piece, piece_of, rows_of
from zero_optim.step.partial import PartialGradient


@dataclass
class Setting:
    """How to build a run, with whole gradients or with sharded ones.

    Args:
        model: builds the model, with equal values each time.
        optimizer: builds the optimizer over the model.
        options: of both wrappers.
        accumulate: of `ShardedDataParallel`.
    """

    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], ZeroRedundancyOptimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: Any = "owner"

    def whole(self) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        """Our DDP and the optimizer."""
        model = self.model()
        optimizer = self.optimizer(model)
        return DistributedDataParallel(model, **self.options), optimizer

    def sharded(self) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
        """The wrapper whose gradients are sharded, and the optimizer."""
        model = self.model()
        optimizer = self.optimizer(model)
        return ShardedDataParallel(model, optimizer, accumulate=self.accumulate, **self.options), optimizer


def cut_adamw(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    with cutting():
        optimizer = adamw(model, bucket_cap_mb=ONE_A_BUCKET, **options)
    assert any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return optimizer


def assert_same_gradients(sharded: ShardedDataParallel, whole: nn.Module) -> None:
    """Gradients are those of a run with whole ones, whole or what this rank has; or None on both sides."""
    optimizer = sharded._optimizer
    for (name, param), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        pieces = optimizer.pieces().get(param, ())
        assert_same_gradient(name, param.grad, other.grad, piece_of(pieces, optimizer.ranks.rank))


def assert_same_gradient(name: str, got: Tensor | None, want: Tensor | None, piece: Piece | None) -> None:
    """Compare all of a gradient, or of a partial one the rows of this rank."""
    if got is None or want is None:
        assert got is want, (name, got, want)
    elif not isinstance(got, PartialGradient):
        assert torch.equal(got.to_dense(), want.to_dense()), (name, got, want)
    elif piece is None or got.piece is None:
        assert got.piece is piece, (name, got, piece)
    else:
        assert torch.equal(got.piece.to_dense(), rows_of(want, piece).to_dense()), (name, got, want)
