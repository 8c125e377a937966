"""Turns ``--optimizer`` and ``--opt`` into a class and its options, and tries them."""

import ast
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

import torch
from torch.optim import Optimizer

from zero_optim.demo.config import OptionValue
from zero_optim.probe.probe import probe
from zero_optim.probe.traits import Traits

Options = tuple[tuple[str, OptionValue], ...]
_PRESETS: dict[str, OptionValue] = {"lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}  # of AdamW
_WORDS: dict[str, OptionValue] = {"true": True, "false": False, "none": None}


def find(name: str) -> type[Optimizer]:
    """Return a class of torch.optim, torch_optimizer, or ``package.module:Class``; else ValueError."""
    if ":" in name:
        return _import(name)
    classes, hint = _classes(torch.optim), "class of torch.optim or torch_optimizer, or package.module:Class"
    if importlib.util.find_spec("torch_optimizer") is not None:
        classes = _classes(importlib.import_module("torch_optimizer")) | classes
    else:
        hint = "class of torch.optim or package.module:Class, or get those of torch_optimizer: pip install "
        hint += "'zero-optim[optimizers]'"
    if name in classes:
        return classes[name]
    raise ValueError(f"unknown optimizer {name}{_closest(name, classes)}; give a {hint}")


def _import(name: str) -> type[Optimizer]:
    module_name, _, class_name = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: users try classes of their current folder
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ValueError(f"cannot import {name}: {_one_line(error)}") from error
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise ValueError(f"{name} is not a class derived from torch.optim.Optimizer")
    return kind


def _classes(module: ModuleType) -> dict[str, type[Optimizer]]:
    members = inspect.getmembers(module, inspect.isclass)
    return {name: value for name, value in members if issubclass(value, Optimizer) and value is not Optimizer}


def parse(arguments: Iterable[str]) -> dict[str, OptionValue]:
    """Parse ``key=value`` pairs; a value that is no Python literal is a string."""
    options = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"--opt takes KEY=VALUE, such as lr=3e-4, got {argument}")
        try:
            # Otherwise "false" would be a string, which counts as true.
            value = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        options[key] = _immutable(key, value)
    return options


def _immutable(key: str, value: object) -> OptionValue:
    if isinstance(value, list | tuple):
        return tuple(_immutable(key, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"--opt {key} must be a number, a string, a boolean or a tuple, got {value!r}")


def with_presets(optimizer: str, options: Mapping[str, OptionValue]) -> Options:
    """Add options that suit the demo's model, where the user gives none; for AdamW only."""
    return tuple(sorted({**(_PRESETS if optimizer == "AdamW" else {}), **options}.items()))


def has_rate(optimizer: Optimizer) -> bool:
    """Return whether there is a learning rate to schedule; a few classes choose their own."""
    return isinstance(optimizer.param_groups[0].get("lr"), int | float)


def check(name: str, options: Options) -> tuple[Optimizer, Traits]:
    """Check that the class takes the options and can be sharded; return the trial and the probe's answers."""
    optimizer_class = find(name)
    _, *parameters = inspect.signature(optimizer_class).parameters.values()
    known = [parameter.name for parameter in parameters]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)  # then only the class can say
    for key, _ in options:
        if key not in known and not takes_any:
            raise ValueError(f"{name} has no option {key}{_closest(key, known)}; it takes {', '.join(known)}")
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(4, 3))
    weight.grad = torch.full_like(weight, 0.5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 will show them
            trial = optimizer_class([weight], **dict(options))  # type: ignore[arg-type]
            trial.step()
    except Exception as error:  # a class may raise anything
        raise ValueError(f"{name} failed on a small trial: {_one_line(error)}") from error
    traits = probe(optimizer_class, dict(options))
    if not traits.separable:
        reason = " ".join((traits.untried or traits.coupling or "").split())
        raise ValueError(f"{name} cannot be sharded: {reason}")
    return trial, traits


def _closest(name: str, known: Iterable[str]) -> str:
    by_lower = {entry.lower(): entry for entry in known}
    close = get_close_matches(name.lower(), by_lower, n=3)
    return f"; did you mean {' or '.join(by_lower[entry] for entry in close)}?" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
