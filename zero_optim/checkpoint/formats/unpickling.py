"""Reads pickles of other libraries without running their code."""

import pickle
import sys
from collections import OrderedDict
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

# What tensors and plain containers are rebuilt with. Storages are torch.load's own.
_HARMLESS = {
    ("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch", "Tensor"),
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
_IN_PYTHON: Any = pickle._Unpickler  # that in C sets attributes of classes, and allocates what an index says


class SafeUnpickler(_IN_PYTHON):  # type: ignore[misc]
    """Builds tensors, plain values and DCP's metadata; UnpicklingError for all else."""

    dispatch: ClassVar[dict[int, Any]] = dict(_IN_PYTHON.dispatch)

    def load_build(self) -> None:
        """Set an object's attributes, unless others share it, as they share classes and functions."""
        target = self.stack[-2]
        is_own = is_dataclass(target) and not isinstance(target, type)
        if not is_own and not isinstance(target, torch.Tensor | OrderedDict | Unknown):
            raise pickle.UnpicklingError(f"it sets attributes of {target!r}, which is not its own")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class or a function
        """See the base class."""
        metadata = "torch.distributed.checkpoint.metadata"  # its classes have fields, and nothing else
        known = getattr(sys.modules.get(module), name, None) if "." not in name else None
        is_type = isinstance(known, torch.dtype) or (
            module == metadata and isinstance(known, type) and known.__module__ == module
        )
        if is_type or (module, name) in _HARMLESS:
            return super().find_class(module, name)
        return self.unknown(module, name)

    def unknown(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Return what stands for an unknown class."""
        raise pickle.UnpicklingError(f"it needs {module}.{name}, which is not read: it might run code")


class Unknown:
    """Stands for an object of a class that is not imported; has its attributes."""

    def __init__(self, *_args: object) -> None:
        pass


class _Tolerant(SafeUnpickler):
    def unknown(self, module: str, name: str) -> Any:  # noqa: ANN401
        return type(name, (Unknown,), {"__module__": module})


# For torch.load(pickle_module=…): objects of unknown classes become `Unknown`.
tolerant = SimpleNamespace(Unpickler=_Tolerant, __name__="tolerant")
