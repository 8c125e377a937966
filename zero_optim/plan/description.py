"""Texts that ranks compare: values by value, functions by code, library code by name, others by type."""

import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHOWN_NUMEL = 4  # tensors up to this size are shown; of larger ones, a digest of their bytes
_COMPARED_NBYTES = 2**20  # of larger tensors only shape and dtype count: reading them would take long
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range)


def describe(value: object, *, bound: bool = True) -> str:
    """Describe any value in one line; ``bound=False`` ignores values bound to functions, except functions."""
    return _Describer(bound).describe(value)


def describe_hook(hook: object, state: object) -> list[str]:
    """Describe a comm hook by code, and its state by type; PyTorch's and our states add options."""
    kind, shown = type(state), []
    if kind.__module__.partition(".")[0] in ("torch", "zero_optim"):
        is_ours = isinstance(vars(kind).get("__init__"), FunctionType)  # not that of a process group
        options = inspect.signature(kind).parameters if is_ours else ()
        held = {name: getattr(state, name, None) for name in options}
        shown = [f"{name}={value!r}" for name, value in held.items() if type(value) in _PLAIN]
    return [f"hook {describe(hook, bound=False)}", f"state {_name(kind)}({', '.join(shown)})"]


class _Describer:
    def __init__(self, bound: bool) -> None:
        self._bound = bound
        self._open: list[object] = []

    def describe(self, value: object) -> str:
        if isinstance(value, Enum):
            return f"{_name(type(value))}.{value.name}"
        if type(value) in _PLAIN:
            return repr(value)
        if any(value is other for other in self._open):
            return f"the same {_name(type(value))} again"
        self._open.append(value)
        try:
            return self._object(value)
        finally:
            self._open.pop()

    def _object(self, value: Any) -> str:  # noqa: ANN401, PLR0911 - one line a kind
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, torch.device):
            return f"device {value.type}"
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
            return self._function(value)
        if isinstance(value, _PLAIN):  # of a class derived from one
            plain: Any = next(kind for kind in _PLAIN if isinstance(value, kind))
            return f"{_name(type(value))}({plain.__repr__(value)})"
        if isinstance(value, Mapping | set | frozenset | list | tuple):
            return self._container(value)
        return self._instance(value)

    def _container(self, value: Any) -> str:  # noqa: ANN401 - any kind of container
        kind = "" if type(value) in (dict, list, tuple) else _name(type(value))
        if isinstance(value, Mapping):
            pairs = sorted(f"{self.describe(key)}: {self.describe(item)}" for key, item in value.items())
            return f"{kind}{{{', '.join(pairs)}}}"
        if isinstance(value, set | frozenset):
            return f"{kind}{{{', '.join(sorted(map(self.describe, value)))}}}"
        inside = ", ".join(map(self.describe, value))
        return f"{kind}[{inside}]" if isinstance(value, list) else f"{kind}({inside})"

    def _partial(self, value: "functools.partial[Any]") -> str:
        arguments = [*map(self._bound_value, value.args)]
        arguments += [f"{key}={self._bound_value(item)}" for key, item in sorted(value.keywords.items())]
        return f"partial({', '.join([self.describe(value.func), *filter(None, arguments)])})"

    def _bound_value(self, value: object) -> str:
        return self.describe(value) if self._bound or callable(value) else ""

    def _function(self, function: Any) -> str:  # noqa: ANN401 - kinds of functions have no common type
        function = _unwrapped(function)
        if isinstance(function, MethodType):
            return f"{self._function(function.__func__)} of {self._bound_value(function.__self__)}"
        if _is_library(getattr(function, "__module__", None)) or not isinstance(function, FunctionType):
            return _name(function)
        return f"{_name(function)} (code {_digest(self._parts_of(function))})"

    def _parts_of(self, function: FunctionType) -> Iterable[str]:
        yield from _parts_of_code(function.__code__)
        for value in function.__defaults__ or ():
            yield self._bound_value(value)
        for key, value in sorted((function.__kwdefaults__ or {}).items()):
            yield f"{key}={self._bound_value(value)}"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":  # of a method that calls super(): the class that defines it
                continue
            try:
                yield f"{name} is {self._bound_value(cell.cell_contents)}"
            except ValueError:  # not filled yet
                yield f"{name} is nothing yet"

    def _class(self, cls: type) -> str:
        """Name a class; digest the user's methods in it and its bases, without attributes."""
        if _is_library(cls.__module__):
            return _name(cls)
        parts: list[str] = []
        for place, base in enumerate(cls.__mro__):
            parts.append(_name(base))
            entries = {} if _is_library(base.__module__) else vars(base)
            for key, entry in sorted(entries.items()):
                # PyTorch replaces `step` at a class's first instance, perhaps on some ranks alone.
                inherited = [vars(each).get(key) for each in cls.__mro__[place + 1 :]]
                if isinstance(entry, FunctionType) and _unwrapped(entry) in map(_unwrapped, inherited):
                    continue
                functions: tuple[object, ...] = (entry,)
                if isinstance(entry, staticmethod | classmethod):
                    functions = (entry.__func__,)
                elif isinstance(entry, property):
                    functions = (entry.fget, entry.fset, entry.fdel)
                parts += [f"{key} = {self.describe(f)}" for f in functions if isinstance(f, FunctionType)]
        return f"{_name(cls)} (code {_digest(parts)})"

    def _instance(self, value: object) -> str:
        kind = f"{_name(type(value))} {getattr(value, '__qualname__', '')}".rstrip()
        held: dict[str, Any] = {}
        if is_dataclass(value):
            held = {field.name: getattr(value, field.name, None) for field in fields(value)}
        elif callable(value) and not isinstance(value, torch.nn.Module):
            held = {key: item for key, item in getattr(value, "__dict__", {}).items() if type(item) in _PLAIN}
            kind = self.describe(type(value))
        if not held or not self._bound:
            return f"a {kind}"
        return f"{kind}({', '.join(f'{key}={self.describe(item)}' for key, item in sorted(held.items()))})"


def _unwrapped(function: Any) -> Any:  # noqa: ANN401 - kinds of functions have no common type
    while hasattr(function, "__wrapped__") and _is_library(
        getattr(function, "__globals__", {}).get("__name__")
    ):
        function = function.__wrapped__
    return function


def _parts_of_code(code: CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_flags))
    for constant in code.co_consts:
        yield _constant(constant)


def _constant(value: object) -> str:
    """Describe a constant; sorts frozensets, whose order differs between processes."""
    if isinstance(value, CodeType):
        return f"{value.co_name} {_digest(_parts_of_code(value))}"
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


def _is_library(module: object) -> bool:
    top = str(module).partition(".")[0]
    return top in ("torch", "builtins", "abc", "typing", "functools", "collections", "None")


def _name(value: Any) -> str:  # noqa: ANN401 - a class or function
    """Return a name without the module, which varies for scripts."""
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _tensor(value: Tensor) -> str:
    what = f"{value.dtype}, shape {tuple(value.shape)} on {value.device.type}"
    if value.requires_grad or type(value) is not Tensor or value.layout != torch.strided:
        return f"{_name(type(value))}({what})"
    if value.device.type == "meta" or value.nbytes > _COMPARED_NBYTES:
        return f"tensor({what})"
    if value.numel() <= _SHOWN_NUMEL:
        return f"tensor({value.tolist()}, {what})"
    raw = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return f"tensor({what}, bytes {hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:12]})"


def _array(value: "np.ndarray[Any, Any] | np.generic") -> str:
    what = f"{value.dtype}, shape {value.shape}"
    if value.dtype.hasobject or value.nbytes > _COMPARED_NBYTES:
        return f"array({what})"
    if value.size <= _SHOWN_NUMEL:
        return f"array({value.tolist()}, {what})"
    return f"array({what}, bytes {hashlib.sha256(value.tobytes()).hexdigest()[:12]})"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()[:8]
