"""zero_optim: optimizers for PyTorch whose state is sharded over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

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

_PACKAGES = ("checkpoint", "ddp", "hooks", "integrations")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"zero_optim.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]


__version__ = "0.1.0"  # the one place; pyproject.toml reads it from here
