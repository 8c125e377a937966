"""Calls sent to new processes, also those of functions that no import finds.

Note [By value]
    Pickle sends functions and classes as names to import. A new process imports modules and a script's main
    module, but not what was typed into a notebook or a prompt, and no import finds lambdas and nested
    functions. These are sent as code, with the global names that the code uses; both ends run the same
    Python. In the new process they live in ``__main__``, where pickle looks for their like, so that instances
    of such classes can be sent back.
"""

import copyreg
import dataclasses
import dis
import importlib
import io
import linecache
import marshal
import pickle
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_Reduced = tuple[Any, ...]  # what pickle takes for an object: maker, its arguments, state, None, None, setter

# Told apart by identity, so that a copy would not do.
_MARKS = [name for name, value in vars(dataclasses).items() if type(value).__module__ == "dataclasses"]
# Entries of a class that its making brings about.
_MADE = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__", "_abc_impl"}
_GLOBAL_OPS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


def pack(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Encode a call; `launch` does, for all ranks at once.

    Raises:
        TypeError: the function, an argument, or something that the function uses cannot be sent.
    """
    stream = io.BytesIO()
    try:
        _Packer(stream).dump((function, args))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} cannot be sent to new processes with its arguments and what it uses: {error}. Make such "
            "things on the ranks, inside the function, or define them in a module"
        ) from error
    return stream.getvalue()


def unpack(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Decode what `pack` made, on a rank."""
    function, args = pickle.loads(call)
    return function, args


def can_import_main() -> bool:
    """Whether a new process can import the main module: not that of a notebook or a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")


class _Packer(pickle.Pickler):
    """Pickles by reference what can be imported, by value what cannot."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, **_REDUCE}

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - pickle's signature
        if isinstance(obj, types.FunctionType | type):
            return NotImplemented if _is_importable(obj) else _reduce_code(obj)
        if type(obj).__module__ == "dataclasses":
            return next(
                ((getattr, (dataclasses, name)) for name in _MARKS if obj is _mark(name)), NotImplemented
            )
        return NotImplemented


def _proxy(contents: dict[str, Any]) -> types.MappingProxyType[str, Any]:
    return types.MappingProxyType(contents)


# What classes are made of, besides functions, and what code refers to.
_REDUCE: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: lambda module: (importlib.import_module, (module.__name__,)),
    property: lambda it: (property, (it.fget, it.fset, it.fdel, it.__doc__)),
    classmethod: lambda it: (classmethod, (it.__func__,)),
    staticmethod: lambda it: (staticmethod, (it.__func__,)),
    types.MappingProxyType: lambda it: (_proxy, (dict(it),)),
}


def _mark(name: str) -> object:
    return getattr(dataclasses, name)


def _reduce_code(obj: types.FunctionType | type) -> _Reduced:
    return _reduce_class(obj) if isinstance(obj, type) else _reduce_function(obj)


def _is_importable(obj: types.FunctionType | type) -> bool:
    """Whether a new process finds this very object under its name."""
    if obj.__module__ == "__main__" and not can_import_main():
        return False
    if obj.__module__ == "builtins" and isinstance(obj, type):
        return True  # some have names that builtins lacks, which pickle knows
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


# ---------------------------------------------------------------------- functions


def _reduce_function(function: types.FunctionType) -> _Reduced:
    code, scope, cells = function.__code__, function.__globals__, function.__closure__ or ()
    home = scope["__name__"]
    used: dict[str, Any] = {}
    if home == "__main__" and not can_import_main():
        used = {name: scope[name] for name in _global_names(code) if name in scope}
    state = {
        "attributes": {
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
            **function.__dict__,
        },
        "cells": [_content(cell) for cell in cells],
        "globals": used,
        "submodules": [name for value in used.values() for name in _submodules(value, code)],
        "lines": (code.co_filename, linecache.getlines(code.co_filename)),
    }
    make = (marshal.dumps(code), home, function.__name__, len(cells))
    return _make_function, make, state, None, None, _fill_function


def _make_function(code: bytes, home: str, name: str, num_cells: int) -> types.FunctionType:
    scope = vars(importlib.import_module(home))
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(marshal.loads(code), scope, name, None, cells)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Complete a function, when whatever refers back to it can find it."""
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        if content:
            (cell.cell_contents,) = content
    for name in state["submodules"]:
        importlib.import_module(name)
    function.__globals__.update(state["globals"])
    path, lines = state["lines"]
    if lines and path not in linecache.cache:  # so that tracebacks show the line of a cell
        linecache.cache[path] = (sum(map(len, lines)), None, lines, path)


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Give a code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> list[str]:
    """List the global names that code uses, in order."""
    found = (step for part in _codes(code) for step in dis.get_instructions(part))
    return list(dict.fromkeys(step.argval for step in found if step.opname in _GLOBAL_OPS))


def _submodules(value: object, code: types.CodeType) -> list[str]:
    """List the submodules that code may reach through a package, as ``a.b`` does after ``import a.b``."""
    if not isinstance(value, types.ModuleType):
        return []
    words = {word for part in _codes(code) for word in part.co_names}
    start = value.__name__ + "."
    return [
        name
        for name in list(sys.modules)
        if name.startswith(start) and words.issuperset(name[len(start) :].split("."))
    ]


# ---------------------------------------------------------------------- classes


def _reduce_class(kind: type) -> _Reduced:
    if type(kind) not in (type, ABCMeta):
        raise pickle.PicklingError(
            f"class {kind.__qualname__}, of metaclass {type(kind).__name__}, can only be imported"
        )
    contents = dict(vars(kind))
    made: dict[str, Any] = {name: contents[name] for name in ("__slots__", "__doc__") if name in contents}
    slots = contents.get("__slots__", ())
    own = {*_MADE, *([slots] if isinstance(slots, str) else slots)}
    head: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **made}
    rest = {name: value for name, value in contents.items() if name not in own}
    return _make_class, (type(kind), kind.__name__, kind.__bases__, head), rest, None, None, _fill_class


def _make_class(meta: type, name: str, bases: tuple[type, ...], head: Mapping[str, Any]) -> type:
    kind = types.new_class(name, bases, {"metaclass": meta}, lambda scope: scope.update(head))
    if head["__module__"] == "__main__" and head["__qualname__"] == name:
        vars(sys.modules["__main__"]).setdefault(
            name, kind
        )  # instances sent back are pickled under this name
    return kind


def _fill_class(kind: type, contents: Mapping[str, Any]) -> None:
    for name, value in contents.items():
        setattr(kind, name, value)
