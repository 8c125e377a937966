"""Check a run before any process starts. Nothing here communicates."""

import importlib.util
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_optim.demo import optimizers, ranks, saved, text
from zero_optim.demo.config import RunConfig, defaults, flag
from zero_optim.demo.metrics import METRICS
from zero_optim.demo.model import GPT
from zero_optim.demo.saved import Saved
from zero_optim.probe.probe import probe

_EXTRAS = ("matplotlib", "rich")
_FIXED = (
    "optimizer",
    "options",
    "context",
    "layers",
    "width",
    "heads",
)  # these must be equal when a run is resumed


@dataclass(frozen=True, slots=True)
class Started:
    """The place of a rank that torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def prepare(given: Mapping[str, Any], started: Started | None) -> RunConfig:
    """Make the configuration of a run from the command line, and check it. Starts no process.

    Args:
        given: the fields of `RunConfig` on the command line, with ``options`` still a list of KEY=VALUE and
            ``resume`` as `saved.locate` takes it. The others come from the checkpoint that is resumed, or are
            the defaults.
        started: this rank, if torchrun started it.

    Raises:
        ValueError: what is wrong, in one line.
    """
    check_extras()
    path = saved.locate(given["resume"]) if given.get("resume") is not None else None
    found = saved.look(path) if path is not None else None
    if found is not None:
        _check_class(found.run.optimizer, named="optimizer" in given)
    config = _merge(given, found, path, started)
    if found is not None:
        _check_fits(config, found)
    config.check_ranks(config.nproc if started is None else started.world_size)
    ranks.choose_device(config.device, config.nproc)
    trial = optimizers.check(config.optimizer, config.options)
    scheduled = [flag(name) for name in ("schedule", "warmup") if name in given]
    if scheduled and not optimizers.has_rate(trial):
        raise ValueError(
            f"{config.optimizer} has no fixed learning rate to schedule: leave out {' and '.join(scheduled)}"
        )
    text.load(config.text, config.context)
    if config.overlap != "off":
        traits = probe(type(trial), dict(config.options), [{}])
        if not traits.steppable_in_parts:
            raise ValueError(f"--overlap: {config.optimizer} cannot be stepped in parts: {traits.counting}")
    return config


def check_extras() -> None:
    """Check that the packages for the display and the pictures are installed.

    Raises:
        ValueError: one is missing. The message has the command that installs it.
    """
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'zero-optim[demo]'")


def make_folder(config: RunConfig) -> None:
    """Make the run folder, or check that an existing one belongs to this run. Only one process calls.

    Raises:
        ValueError: the folder holds another run, or cannot be written to.
    """
    folder = Path(config.out)
    own = config.resume is not None and saved.run_folder(config.resume) == folder
    if not own and any((folder / name).exists() for name in (saved.FOLDER, METRICS)):
        raise ValueError(f"{folder} holds a run: resume it with --resume {folder}, or give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the run folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to the run folder {folder}")


def _check_class(name: object, *, named: bool) -> None:
    """Refuse to import a module that only the checkpoint names: a file must never choose which code runs."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.]+(:[\w.]+)?", name):
        raise ValueError(f"the checkpoint names no optimizer class, but {ascii(name)[:80]}")
    if ":" in name and not named:
        raise ValueError(
            f"the checkpoint names the optimizer class {name}, and importing it runs its module: "
            f"if you trust it, give --optimizer {name}"
        )


def _merge(
    given: Mapping[str, Any], found: Saved | None, path: Path | None, started: Started | None
) -> RunConfig:
    base = found.run.to_dict() if found is not None else defaults()
    fields = base | dict(given)
    if started is not None:
        here = started.local_world_size
        if given.get("nproc", here) != here:
            raise ValueError(
                f"--nproc {given['nproc']}, but torchrun started {here} ranks on this host: leave --nproc out"
            )
        fields["nproc"] = here
    named = optimizers.parse(given.get("options", ()))
    if fields["optimizer"] == base["optimizer"]:
        named = dict(base["options"]) | named
    fields["options"] = optimizers.with_presets(fields["optimizer"], named)
    if fields["overlap"] != "off" and "clip" not in given:
        fields["clip"] = 0.0
    fields["text"] = tuple(str(Path(name).resolve()) for name in fields["text"])
    fields["resume"] = str(path) if path is not None else None
    if "out" not in given:
        fields["out"] = str(saved.run_folder(path)) if path is not None else _new_folder(fields["optimizer"])
    return RunConfig(**fields)


def _new_folder(optimizer: str) -> str:
    """Name a run after its optimizer and the time, with a number if others have the same name."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", optimizer.rpartition(":")[2]).strip("-").lower()
    name = Path("runs") / f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = sum(1 for _ in name.parent.glob(name.name + "*"))
    return f"{name}-{others + 1}" if others else str(name)


def _check_fits(config: RunConfig, found: Saved) -> None:
    for name in _FIXED:
        now, then = getattr(config, name), getattr(found.run, name)
        if now != then:
            raise ValueError(
                f"the checkpoint is of another run: it has {_spell(name, then)}, "
                f"this run has {_spell(name, now)}"
            )
    with torch.device("meta"):  # sizes without memory
        expected = {name: tuple(tensor.shape) for name, tensor in GPT(config.shape).state_dict().items()}
    if found.shapes != expected:
        raise ValueError("the checkpoint's model has other tensors than this version's")
    if config.steps <= found.step:
        raise ValueError(f"the run has already made {found.step} updates: to continue, give a larger --steps")


def _spell(name: str, value: Any) -> str:  # noqa: ANN401 - any field's value
    if name == "options":
        return "--opt " + " ".join(f"{key}={option}" for key, option in value)
    return f"{flag(name)} {value}"
