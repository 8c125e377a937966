"""The checkpoint of a run: one file, whole or absent, read without running any code in it.

It holds no random state but the seed, in the config, and the step: the order of samples is a function
of these, and nothing else in an update draws (the optimizer refuses classes that do).
"""

import os
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.demo.config import RunConfig

FILE = "checkpoint.pt"
_FORMAT = "zero-optim train, 1"
# What torch.load raises for files that are torn, foreign, or hold more than tensors and plain values.
_UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, OSError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A run after some update.

    Attributes:
        config: the run, as JSON.
        step: updates made.
        text_digest: of the text it was trained on.
        model: the model's state dict.
        optimizer: the whole optimizer's, in the format of ``torch.optim``.
        scheduler: the learning rate schedule's, empty where there is none.
    """

    config: str
    step: int
    text_digest: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]

    @property
    def run(self) -> RunConfig:
        """The run that it was saved by."""
        return RunConfig.from_json(self.config)

    def save(self, folder: Path) -> None:
        """Write to ``folder``, in the place of the one before; called by rank 0.

        Written beside and renamed, after it has reached the disk: whatever ends the process, the
        file under the right name is whole.
        """
        beside = folder / (FILE + ".part")
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        with beside.open("wb") as file:
            torch.save({"format": _FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / FILE)
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locate(place: str) -> Path:
    """Find the checkpoint file of a run folder, of a file's own path, or, for "", of the newest run.

    Raises:
        ValueError: there is none.
    """
    if place == "":
        newest = max(Path("runs").glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            raise ValueError(f"--resume found no runs/*/{FILE} here: name a run folder")
        return newest
    path = Path(place)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}")
    return path


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; its tensors are read from the file when they are used.

    Raises:
        ValueError: the file is torn, or none of ours.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError("another format")
        loaded = Checkpoint(**content)
        _ = loaded.run  # reads
    except _UNREADABLE as error:
        raise ValueError(f"{path} is no checkpoint of zero-optim train: torn, or not made by it") from error
    return loaded
