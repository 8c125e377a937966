"""From ``--optimizer`` and ``--opt`` to a class and its options, checked by trying them."""

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
from typing import Any

import torch
from torch.optim import Optimizer

from zero_optim.demo.config import OptionValue
from zero_optim.probe.probe import probe

Options = tuple[tuple[str, OptionValue], ...]


def find(name: str) -> type[Optimizer]:
    """Find a class by name in torch.optim, then in torch_optimizer, or as ``package.module:Class``.

    Raises:
        ValueError: there is none, with the names that come close.
    """
    if ":" in name:
        return _find_in_module(name)
    known = _classes(torch.optim)
    if importlib.util.find_spec("torch_optimizer") is not None:
        known = _classes(importlib.import_module("torch_optimizer")) | known
    if name in known:
        return known[name]
    raise ValueError(f"unknown optimizer {name}{_closest(name, known)}{_where_to_look()}")


def _where_to_look() -> str:
    if importlib.util.find_spec("torch_optimizer") is not None:
        return "; give a class of torch.optim or torch_optimizer, or package.module:Class"
    return (
        "; give a class of torch.optim or package.module:Class, "
        "or get those of torch_optimizer: pip install 'zero-optim[optimizers]'"
    )


def _find_in_module(name: str) -> type[Optimizer]:
    module_name, _, class_name = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` would: people try classes from the folder they are in
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs code of the user's: it may raise anything
        raise ValueError(f"cannot import {name}: {_one_line(error)}") from error
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        raise ValueError(f"{name} is not a class derived from torch.optim.Optimizer")
    return found


def _classes(module: ModuleType) -> dict[str, type[Optimizer]]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }


def parse(arguments: Iterable[str]) -> dict[str, OptionValue]:
    """Read ``key=value`` pairs; values are Python literals, and strings where they are none.

    Raises:
        ValueError: no pair, or a value that is neither a number, a string, a truth value nor a tuple.
    """
    options = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"--opt takes KEY=VALUE, such as lr=3e-4, got {argument}")
        options[key] = _literal(key, value)
    return options


def _literal(key: str, text: str) -> OptionValue:
    words: dict[str, OptionValue] = {"true": True, "false": False, "none": None}
    if text.lower() in words:  # else "false" would be a string, and true
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return _immutable(key, value)


def _immutable(key: str, value: object) -> OptionValue:
    if isinstance(value, list | tuple):
        return tuple(_immutable(key, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"--opt {key} must be a number, a string, a truth value or a tuple, got {value!r}")


def with_presets(optimizer: str, options: Mapping[str, OptionValue]) -> Options:
    """Fill in what suits the demo's model, where the user names nothing else: AdamW only."""
    presets: dict[str, OptionValue] = {}
    if optimizer == "AdamW":
        presets = {"lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return tuple(sorted({**presets, **options}.items()))


def keywords(options: Options) -> dict[str, Any]:
    """Give options as keyword arguments, whose types only the class knows."""
    return dict(options)


def has_rate(optimizer: Optimizer) -> bool:
    """Say whether there is a learning rate to schedule; a few classes find their own."""
    return isinstance(optimizer.param_groups[0].get("lr"), int | float)


def check(name: str, options: Options) -> Optimizer:
    """See whether the class takes the options and steps a matrix with them.

    Returns:
        The optimizer of the trial.

    Raises:
        ValueError: an option it does not know, values it refuses, or a class that needs more than a
            gradient (a closure, sparse gradients), or that does not treat parameters one by one.
    """
    optimizer_class = find(name)
    _check_names(name, optimizer_class, options)
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(4, 3))
    weight.grad = torch.full_like(weight, 0.5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 will give them
            trial = optimizer_class([weight], **keywords(options))
            trial.step()
    except Exception as error:  # likewise
        raise ValueError(f"{name} failed on a small trial: {_one_line(error)}") from error
    traits = probe(optimizer_class, keywords(options))
    if not traits.separable:
        raise ValueError(
            f"{name} cannot be sharded: {' '.join((traits.untried or traits.coupling or '').split())}"
        )
    return trial


def _check_names(name: str, optimizer_class: type[Optimizer], options: Options) -> None:
    _, *parameters = inspect.signature(optimizer_class).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # only the class itself can say
    known = [parameter.name for parameter in parameters]
    for key, _ in options:
        if key not in known:
            raise ValueError(f"{name} has no option {key}{_closest(key, known)}; it takes {', '.join(known)}")


def _closest(name: str, known: Iterable[str]) -> str:
    by_lower = {entry.lower(): entry for entry in known}
    close = get_close_matches(name.lower(), by_lower, n=3)
    return f"; did you mean {' or '.join(by_lower[entry] for entry in close)}?" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
