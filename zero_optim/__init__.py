"""zero_optim: optimizers for PyTorch whose state is sharded over ranks."""

from zero_optim.errors import (
    NotConsolidatedError,
    RankMismatchError,
    RemoteRankError,
    StateMismatchError,
    ZeroOptimError,
)
from zero_optim.optimizer import ZeroRedundancyOptimizer

__all__ = [
    "NotConsolidatedError",
    "RankMismatchError",
    "RemoteRankError",
    "StateMismatchError",
    "ZeroOptimError",
    "ZeroRedundancyOptimizer",
]
