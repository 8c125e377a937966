"""zero_optim: optimizers for PyTorch whose state is sharded over ranks."""

from zero_optim.errors import (
    CheckpointError,
    NotConsolidatedError,
    RankMismatchError,
    RemoteRankError,
    StateMismatchError,
    ZeroOptimError,
)
from zero_optim.launch import LaunchTimeoutError, RankFailedError, launch
from zero_optim.optimizer import ZeroRedundancyOptimizer

__all__ = [
    "CheckpointError",
    "LaunchTimeoutError",
    "NotConsolidatedError",
    "RankFailedError",
    "RankMismatchError",
    "RemoteRankError",
    "StateMismatchError",
    "ZeroOptimError",
    "ZeroRedundancyOptimizer",
    "launch",
]
