"""Checkpoints, complete or absent, that load on any number of ranks: docs/checkpoints.md."""

from zero_optim.checkpoint.dcp import OptimizerState, Reader, SafeLoadPlanner, Writer
from zero_optim.checkpoint.folder import latest
from zero_optim.checkpoint.loading import Peek, load, peek
from zero_optim.checkpoint.saving import PendingSave, save, save_async

__all__ = [
    "OptimizerState",
    "Peek",
    "PendingSave",
    "Reader",
    "SafeLoadPlanner",
    "Writer",
    "latest",
    "load",
    "peek",
    "save",
    "save_async",
]
