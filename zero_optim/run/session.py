"""Sends a call to new processes, even of a function that they cannot import.

Pickle sends a function as a name. cloudpickle, an optional package, sends lambdas, nested functions and those
of a notebook as code.
"""

import importlib.util
import linecache
import pickle
import sys
from collections.abc import Callable
from typing import Any


def encode_call(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Encode a call once for all ranks; TypeError if the function, or what it uses, cannot be sent."""
    try:
        return pickle.dumps((function, args, {})) if not _needs_code(function) else _by_value(function, args)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} cannot be sent to new processes with its arguments and what it uses: {error}. Make such "
            "things on the ranks, inside the function, or define them in a module"
        ) from error


def _by_value(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        raise TypeError("no import finds it, and cloudpickle is not installed (pip install cloudpickle)")
    import cloudpickle

    encoded: bytes = cloudpickle.dumps((function, args, _typed_sources()))
    return encoded


def _typed_sources() -> dict[str, tuple[object, ...]]:
    """Return the source lines typed into a notebook or prompt, for tracebacks on the ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}


def _needs_code(function: Callable[..., object]) -> bool:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    return "<locals>" in name or "<lambda>" in name or (module == "__main__" and not can_import_main())


def decode_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Decode a call on a rank."""
    function, args, sources = pickle.loads(call)
    linecache.cache.update(sources)
    return function, args


def pickler() -> Any:  # noqa: ANN401 - a module
    """Return the module that pickles results: cloudpickle if installed."""
    return importlib.import_module(
        "pickle" if importlib.util.find_spec("cloudpickle") is None else "cloudpickle"
    )


def can_import_main() -> bool:
    """Return whether a new process can import the main module; not in a notebook or at a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")
