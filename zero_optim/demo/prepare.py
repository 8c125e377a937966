"""Checks a run, and the checkpoint it continues, before any process starts. No communication."""

import importlib.util
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_optim import CheckpointError, checkpoint
from zero_optim.demo import optimizers, text
from zero_optim.demo.config import RunConfig, defaults, flag
from zero_optim.demo.model import GPT

METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"
_KIND = "zero-optim train"
_FIXED = ("optimizer", "options", "context", "layers", "width", "heads")  # equal when a run is resumed


class Started(NamedTuple):
    """The place of a rank that torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @staticmethod
    def here() -> "Started | None":
        """Return this process's place; None if torchrun did not start it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        is_started = os.environ.keys() >= set(names)
        return Started(*(int(os.environ[name]) for name in names)) if is_started else None


class Saved(NamedTuple):
    """A checkpoint's content, read without loading it."""

    run: RunConfig  # of the run that saved it
    step: int  # updates made
    text_digest: str  # of the text that the run trained on
    shapes: dict[str, tuple[int, ...]]  # of the model's tensors


def prepare(arguments: Mapping[str, Any], started: Started | None) -> RunConfig:
    """Build and check a run's configuration from the command line; ValueError says in one line what is wrong.

    Fields that are not among the arguments come from the checkpoint, or have their defaults.
    """
    missing = [name for name in ("matplotlib", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'zero-optim[demo]'")
    path = source = None
    if arguments.get("resume") is not None:
        path = locate(arguments["resume"])
        source = look(path)
        _check_name(source.run.optimizer, arguments)
    config = _merge(arguments, source, path, started)
    if source is not None:
        _check_fits(config, source)
    config.check_ranks(config.nproc if started is None else started.world_size)
    choose_device(config.device, config.nproc)
    trial, traits = optimizers.check(config.optimizer, config.options)
    scheduled = [flag(name) for name in ("schedule", "warmup") if name in arguments]
    if scheduled and not optimizers.has_rate(trial):
        raise ValueError(
            f"{config.optimizer} has no fixed learning rate to schedule: leave out {' and '.join(scheduled)}"
        )
    text.load(config.text, config.context)
    if config.overlap != "off" and not traits.steppable_in_parts:
        raise ValueError(f"--overlap: {config.optimizer} cannot be stepped in parts: {traits.counting}")
    return config


def _check_name(name: object, arguments: Mapping[str, Any]) -> None:
    """Refuse to import what a file names: a file must never choose code."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.]+(:[\w.]+)?", name):
        raise ValueError(f"the checkpoint names no optimizer class, but {ascii(name)[:80]}")
    if ":" in name and "optimizer" not in arguments:
        raise ValueError(
            f"the checkpoint names the optimizer class {name}, and importing it runs its module: "
            f"if you trust it, give --optimizer {name}"
        )


def make_folder(config: RunConfig) -> None:
    """Create the run folder, in one process; ValueError if it has another run or cannot be written."""
    folder = Path(config.out)
    own = config.resume is not None and run_folder(config.resume) == folder
    if not own and any((folder / name).exists() for name in (_CHECKPOINTS, METRICS)):
        raise ValueError(f"{folder} holds a run: resume it with --resume {folder}, or give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the run folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to the run folder {folder}")


def choose_device(device: str, local_world_size: int) -> str:
    """Return "cuda" or "cpu"; ValueError for fewer GPUs than ranks on this host."""
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    num_gpus = torch.cuda.device_count() if usable else 0
    if device == "cuda" and num_gpus < local_world_size:
        raise ValueError(
            f"--device cuda needs a GPU for each of {local_world_size} ranks, this host has {num_gpus}"
        )
    return "cuda" if device != "cpu" and num_gpus >= local_world_size else "cpu"


def checkpoint_folder(out: str, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return Path(out) / _CHECKPOINTS / f"{step:08}"


def run_folder(path: str | Path) -> Path:
    """Return a checkpoint's run folder."""
    return Path(path).parent.parent


def extra(config: RunConfig, step: int, text_digest: str) -> dict[str, Any]:
    """Return what a checkpoint has beside model, optimizer and scheduler; step and seed give the samples."""
    return {"kind": _KIND, "config": config.to_json(), "step": step, "text_digest": text_digest}


def locate(place: str) -> Path:
    """Return the newest complete checkpoint of a run folder; "" is the newest run in ``runs``."""
    if place == "":
        runs = Path("runs").glob(f"*/{_CHECKPOINTS}")
        newest_first = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)
        newest = next(filter(None, map(checkpoint.latest, newest_first)), None)
        if newest is None:
            raise ValueError(
                f"--resume found no complete checkpoint in runs/*/{_CHECKPOINTS}: give a run folder"
            )
        return newest
    path = Path(place)
    inside = path / _CHECKPOINTS
    newest = checkpoint.latest(inside if inside.is_dir() else path)
    if newest is None or newest.parent not in (inside, path.parent):
        raise ValueError(f"no checkpoint at {path}" + (" is complete" if inside.is_dir() else ""))
    return newest


def look(path: Path) -> Saved:
    """Read the content of a ``zero-optim train`` checkpoint without loading it; ValueError for others."""
    try:
        peek = checkpoint.peek(path)
        if not isinstance(peek.extra, dict) or peek.extra.get("kind") != _KIND:
            raise ValueError(f"{path} is no checkpoint of zero-optim train")
        run = RunConfig.from_json(peek.extra["config"])
    except (CheckpointError, TypeError, KeyError) as error:
        raise ValueError(str(error)) from error
    return Saved(run, peek.extra["step"], peek.extra["text_digest"], peek.shapes)


def _merge(
    arguments: Mapping[str, Any], source: Saved | None, path: Path | None, started: Started | None
) -> RunConfig:
    base = asdict(source.run) if source is not None else defaults()
    values = base | dict(arguments)
    if started is not None:
        here = started.local_world_size
        if arguments.get("nproc", here) != here:
            raise ValueError(
                f"--nproc {arguments['nproc']}, but torchrun started {here} ranks on this host: "
                "leave --nproc out"
            )
        values["nproc"] = here
    options = optimizers.parse(arguments.get("options", ()))
    if values["optimizer"] == base["optimizer"]:
        options = dict(base["options"]) | options
    values["options"] = optimizers.with_presets(values["optimizer"], options)
    if values["overlap"] != "off" and "clip" not in arguments:
        values["clip"] = 0.0
    values["text"] = tuple(str(Path(name).resolve()) for name in values["text"])
    values["resume"] = str(path) if path is not None else None
    if "out" not in arguments and path is not None:
        values["out"] = str(run_folder(path))
    elif "out" not in arguments:  # named after optimizer and time, with a number if that is taken
        word = re.sub(r"[^A-Za-z0-9]+", "-", values["optimizer"].rpartition(":")[2]).strip("-").lower()
        name = f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"
        others = sum(1 for _ in Path("runs").glob(name + "*"))
        values["out"] = str(Path("runs", f"{name}-{others + 1}" if others else name))
    return RunConfig(**values)


def _check_fits(config: RunConfig, source: Saved) -> None:
    for name in _FIXED:
        values = [getattr(run, name) for run in (source.run, config)]
        if values[0] != values[1]:
            if name == "options":
                values = [" ".join(f"{key}={value}" for key, value in options) for options in values]
            then, now = (f"{flag(name)} {value}" for value in values)
            raise ValueError(f"the checkpoint is of another run: it has {then}, this run has {now}")
    with torch.device("meta"):  # sizes without memory
        expected = {name: tuple(tensor.shape) for name, tensor in GPT(config.shape).state_dict().items()}
    if source.shapes != expected:
        raise ValueError("the checkpoint's model has other tensors than this version's")
    if config.steps <= source.step:
        raise ValueError(
            f"the run has already made {source.step} updates: to continue, give a larger --steps"
        )
