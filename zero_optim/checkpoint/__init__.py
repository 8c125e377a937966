"""Checkpoints, complete or absent, that load on any number of ranks: docs/checkpoints.md."""

from typing import TYPE_CHECKING

from zero_optim.checkpoint.folder import latest
from zero_optim.checkpoint.loading import Peek, load, peek
from zero_optim.checkpoint.saving import PendingSave, save, save_async

if TYPE_CHECKING:
    from zero_optim.checkpoint.dcp import OptimizerState, SafeLoadPlanner
else:

    def __getattr__(name: str) -> object:
        if name in __all__:  # `torch.distributed.checkpoint` takes as long to import as torch does
            from zero_optim.checkpoint import dcp

            return getattr(dcp, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "OptimizerState",
    "Peek",
    "PendingSave",
    "SafeLoadPlanner",
    "latest",
    "load",
    "peek",
    "save",
    "save_async",
]


def __dir__() -> list[str]:
    return __all__
