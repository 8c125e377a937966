"""zero_optim: optimizers for PyTorch whose state is sharded over ranks."""

from zero_optim.comm.agreement import share_host_memory
from zero_optim.compat.memory import return_freed_memory
from zero_optim.errors import (
    CheckpointError,
    LaunchTimeoutError,
    LostStateError,
    NotConsolidatedError,
    RankFailedError,
    RankMismatchError,
    ReductionError,
    RemoteRankError,
    StalledError,
    StateMismatchError,
    ZeroOptimError,
)
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.run.launch import launch

__all__ = [
    "CheckpointError",
    "LaunchTimeoutError",
    "LostStateError",
    "NotConsolidatedError",
    "RankFailedError",
    "RankMismatchError",
    "ReductionError",
    "RemoteRankError",
    "StalledError",
    "StateMismatchError",
    "ZeroOptimError",
    "ZeroRedundancyOptimizer",
    "launch",
    "return_freed_memory",
    "share_host_memory",
]

__version__ = "0.1.0"  # the one place; pyproject.toml reads it from here
