"""The checkpoints of a run: where they are and what they hold. They are read before any rank starts.

A checkpoint has the step, and in the config the seed. The order of samples follows from these two. Nothing
here communicates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_optim import CheckpointError, checkpoint
from zero_optim.demo.config import RunConfig

FOLDER = "checkpoints"
KEPT = 2  # the newest, and the one before, in case the newest is damaged
_KIND = "zero-optim train"


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What a checkpoint holds, read without loading it.

    Attributes:
        run: configuration of the run that saved it.
        step: number of updates made.
        text_digest: of the text that the run trained on.
        shapes: of the model's tensors.
    """

    run: RunConfig
    step: int
    text_digest: str
    shapes: dict[str, tuple[int, ...]]


def folder_of(out: str, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return Path(out) / FOLDER / f"{step:08}"


def run_folder(path: str | Path) -> Path:
    """Return the run folder of a checkpoint."""
    return Path(path).parent.parent


def extra(config: RunConfig, step: int, text_digest: str) -> dict[str, Any]:
    """Return what a checkpoint holds beside model, optimizer and scheduler."""
    return {"kind": _KIND, "config": config.to_json(), "step": step, "text_digest": text_digest}


def locate(place: str) -> Path:
    """Find the newest complete checkpoint.

    Args:
        place: a run folder, a checkpoint itself, or "" for the newest run in ``runs``.

    Raises:
        ValueError: there is none.
    """
    if place == "":
        runs = sorted(Path("runs").glob(f"*/{FOLDER}"), key=lambda path: path.stat().st_mtime, reverse=True)
        found = next(filter(None, map(checkpoint.latest, runs)), None)
        if found is None:
            raise ValueError(f"--resume found no complete checkpoint in runs/*/{FOLDER}: give a run folder")
        return found
    path = Path(place)
    inside = path / FOLDER
    newest = checkpoint.latest(inside if inside.is_dir() else path)
    if newest is None or newest.parent not in (inside, path.parent):
        raise ValueError(f"no checkpoint at {path}" + (" is complete" if inside.is_dir() else ""))
    return newest


def look(path: Path) -> Saved:
    """Read what a checkpoint holds, without loading it.

    Raises:
        ValueError: it is incomplete or damaged, or not of ``zero-optim train``.
    """
    try:
        peek = checkpoint.peek(path)
        if not isinstance(peek.extra, dict) or peek.extra.get("kind") != _KIND:
            raise ValueError(f"{path} is no checkpoint of zero-optim train")
        run = RunConfig.from_json(peek.extra["config"])
    except (CheckpointError, TypeError, KeyError) as error:
        raise ValueError(str(error)) from error
    return Saved(run, peek.extra["step"], peek.extra["text_digest"], peek.shapes)
