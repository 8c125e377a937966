"""Nested values split into a skeleton and tensors, without pickle. No communication.

A skeleton has containers, plain values, and each tensor's dtype, shape and strides. It is JSON, which ranks
send and checkpoints keep: Note [The manifest] in `zero_optim.checkpoint.manifest` lists its kinds.
"""

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.autograd import wraps_tensors
from zero_optim.plan.strides import dense_strides

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

# The first class that fits counts: dict fits all.
_DICTS: dict[str, type[dict[Any, Any]]] = {"ordered": OrderedDict, "counter": Counter, "dict": dict}

# Classes of objects that optimizers of this process keep in their state; a file builds no others.
_object_classes: set[type] = set()
# Classes that are values themselves, such as an option of a group.
_classes: set[type] = set()

Skeleton = list[Any]  # a kind and a body, of what json reads and writes
Nested = Any  # dicts, lists and tuples of tensors and plain values


def encode(value: object, where: str) -> tuple[Skeleton, list[Tensor]]:
    """Split a nested value into a skeleton and its tensors; TypeError for other objects."""
    tensors: list[Tensor] = []
    return _encode(value, where, tensors), tensors


def allow_objects(value: Nested) -> bool:
    """Allow the classes of plain objects and enum members, and classes, in a value to be sent and read.

    Returns whether there are objects or deques.
    """
    objects = list(_objects_in(value, set()))
    for inner in objects:
        if isinstance(inner, type):
            _classes.add(inner)
            continue
        kind = type(inner)
        is_plain = (
            hasattr(inner, "__dict__")
            and kind.__reduce__ is object.__reduce__
            and kind.__reduce_ex__ is object.__reduce_ex__
            and kind.__new__ is object.__new__
            and not any(hasattr(kind, name) for name in ("__setstate__", "__slots__", "__del__"))
            and vars(sys.modules.get(kind.__module__, object)).get(kind.__qualname__) is kind
        )
        if is_plain or isinstance(inner, Enum):
            _object_classes.add(kind)
    return bool(objects)


def _objects_in(value: Nested, seen: set[int]) -> Iterator[object]:
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        if isinstance(value, deque):
            yield value
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _objects_in(inner, seen)
        return
    is_object = not isinstance(value, Tensor | np.ndarray | np.generic) and type(value) not in _PLAIN
    if is_object and id(value) not in seen:
        seen.add(id(value))
        yield value
        yield from _objects_in({} if isinstance(value, type) else getattr(value, "__dict__", {}), seen)


def _encode(value: object, where: str, tensors: list[Tensor]) -> Skeleton:  # noqa: PLR0911 - one a kind
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, np.ndarray):
        return ["array", [_encode_tensor(torch.from_numpy(np.array(value)), where, tensors)]]
    if isinstance(value, dict):
        kind = next(name for name, container in _DICTS.items() if isinstance(value, container))
        return [kind, [[_plain(k, where), _encode(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "size" if isinstance(value, torch.Size) else "tuple"
        return [kind, [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]]
    if type(value) in (set, frozenset):
        inside = sorted(value, key=repr)  # type: ignore[call-overload]
        return [type(value).__name__, [["plain", _plain(v, where)] for v in inside]]
    if isinstance(value, deque):
        return ["deque", [_encode(value.maxlen, where, []), _encode(list(value), where, tensors)]]
    if type(value) in _object_classes:
        is_enum = isinstance(value, Enum)
        inner = value.value if isinstance(value, Enum) else vars(value)
        kind = "enum" if is_enum else "object"
        return [kind, [_encode(_name_of(type(value)), where, []), _encode(inner, where, tensors)]]
    if isinstance(value, type) and value in _classes:
        return ["class", [_encode(_name_of(value), where, [])]]
    return ["plain", _plain(value, where)]


def _name_of(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _plain(value: object, where: str) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in _PLAIN:
        raise TypeError(
            f"{where} holds a {type(value).__name__}, which cannot be sent without running its code"
        )
    return plain_json(value)


def plain_json(value: object) -> Any:  # noqa: ANN401 - whatever json writes
    """Write a plain value in JSON; what JSON lacks as an object with one entry, named after its type."""
    if isinstance(value, float):
        return value if value - value == 0 else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [plain_json(value.real), plain_json(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    return {"device": str(value)} if isinstance(value, torch.device) else value


def plain_value(value: Any) -> Any:  # noqa: ANN401 - whatever was written
    """Read what `plain_json` wrote."""
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "complex":
        return complex(*map(plain_value, body))
    return _READERS[kind](body)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as files do."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name; ValueError if this PyTorch has none."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"this PyTorch has no dtype {name}")


_READERS: Any = {"float": float, "bytes": bytes.fromhex, "dtype": dtype_named, "device": torch.device}


def _encode_tensor(tensor: Tensor, where: str, tensors: list[Tensor]) -> Skeleton:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return _encode_subclass(tensor, where, tensors)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [_encode_tensor(part, where, tensors) for part in (tensor.indices(), tensor.values())]
        return ["sparse", [tuple(tensor.shape), *parts]]
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a tensor of layout {tensor.layout}, which is not supported")
    strides = dense_strides(tensor)
    tensors.append(tensor)
    return ["tensor", [dtype_name(tensor.dtype), tuple(tensor.shape), strides]]


def _encode_subclass(tensor: Tensor, where: str, tensors: list[Tensor]) -> Skeleton:
    """Split a tensor subclass by its own rule if it wraps tensors, else into tensor and attributes."""
    name = _name_of(type(tensor))
    if wraps_tensors(tensor):
        attributes, context = flattened(tensor)
        rest = _encode(context, f"the context of {where}", [])
        form = [tuple(tensor.shape), tensor.stride()]
        inner = [[a, _encode(getattr(tensor, a), f"{where}.{a}", tensors)] for a in attributes]
        return ["wrapper", [name, rest, form, *inner]]
    with private.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(Tensor)
    return ["subclass", [name, _encode(vars(tensor), where, tensors), _encode(plain, where, tensors)]]


def flattened(tensor: Any) -> tuple[list[str], Any]:  # noqa: ANN401 - a class that only has the method in common
    """Return attribute names and context of a tensor that wraps others."""
    attributes, context = tensor.__tensor_flatten__()
    return attributes, context


def rewrapped(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to the tensors that a tensor wraps."""
    attributes, context = flattened(tensor)
    inner = {attribute: change(getattr(tensor, attribute)) for attribute in attributes}
    whole: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return whole


def decode(skeleton: Skeleton, tensors: Iterable[Tensor]) -> Nested:
    """Rebuild a value from skeleton and tensors; TypeError if a tensor subclass is not imported here."""
    left = iter(tensors)
    return rebuilt(skeleton, lambda _: next(left))


def rebuilt(skeleton: Skeleton, take: Callable[[list[Any]], Tensor]) -> Nested:  # noqa: PLR0911 - one a kind
    """Rebuild a value as `decode`; ``take`` returns a tensor by the body of its skeleton, in order."""
    kind, body = skeleton
    if kind == "plain":
        return plain_value(body)
    if kind == "tensor":
        return take(body)
    if kind == "array":
        return rebuilt(body[0], take).numpy()
    if kind == "sparse":
        shape, indices, values = body[0], rebuilt(body[1], take), rebuilt(body[2], take)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=True)
    if kind in ("wrapper", "subclass"):
        return _rebuilt_subclass(kind, body, take)
    if kind in _DICTS:
        return _DICTS[kind]({plain_value(key): rebuilt(part, take) for key, part in body})
    items = [rebuilt(part, take) for part in body]
    return items if kind == "list" else _BUILT[kind](items)


def _known_class(name: list[str], known: set[type]) -> type:
    kind = next((kind for kind in known if _name_of(kind) == name), None)
    if kind is None:
        raise TypeError(
            f"a value needs the class {'.'.join(name)}: build the optimizer that keeps objects of it first"
        )
    return kind


def _built_object(items: list[Any]) -> object:
    name, inner = items
    kind = _known_class(name, _object_classes)
    if issubclass(kind, Enum):
        return kind(inner)
    built = object.__new__(kind)
    vars(built).update(inner)
    return built


_BUILT: dict[str, Callable[[list[Any]], object]] = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda items: deque(items[1], items[0]),
    "object": _built_object,
    "enum": _built_object,
    "class": lambda items: _known_class(items[0], _classes),
}


def _rebuilt_subclass(kind: str, body: list[Any], take: Callable[[list[Any]], Tensor]) -> Tensor:
    subclass: Any = _loaded_subclass(*body[0])
    if kind == "wrapper":
        _, context, (shape, strides), *parts = body
        inner = {attribute: rebuilt(part, take) for attribute, part in parts}
        whole = subclass.__tensor_unflatten__(
            inner, rebuilt(context, take), torch.Size(shape), tuple(strides)
        )
    else:
        attributes, plain = (rebuilt(part, take) for part in body[1:])
        with private.DisableTorchFunctionSubclass():
            whole = plain.as_subclass(subclass)
        vars(whole).update(attributes)
    assert isinstance(whole, Tensor)
    return whole


def _loaded_subclass(module: str, name: str) -> type[Tensor]:
    """Return an imported tensor subclass, past ``__getattr__`` of modules: a file never causes an import."""
    subclass: object = sys.modules.get(module)
    for part in name.split("."):
        try:
            subclass = object.__getattribute__(subclass, "__dict__").get(part)
        except AttributeError:
            subclass = None
    if not (isinstance(subclass, type) and issubclass(subclass, Tensor)):
        raise TypeError(f"a value needs the tensor subclass {module}.{name}: import {module} first")
    return subclass


def parts_of(skeleton: Skeleton) -> list[tuple[Any, Skeleton]]:
    """Return the skeletons inside a skeleton, in the order of their tensors: keys, attributes or places."""
    kind, body = skeleton
    if kind in _DICTS:
        return [(plain_value(key), part) for key, part in body]
    if kind == "wrapper":
        return body[3:]  # type: ignore[no-any-return]
    first = {"plain": None, "tensor": None, "sparse": 1, "subclass": 1}.get(kind, 0)
    return [] if first is None else [(str(place), part) for place, part in enumerate(body[first:])]


def tensors_in(skeleton: Skeleton, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Yield path and body of each tensor of a skeleton, in order."""
    if skeleton[0] == "tensor":
        yield path, skeleton[1]
    for key, part in parts_of(skeleton):
        yield from tensors_in(part, (*path, key))


def map_tensors(value: Nested, change: Callable[[Tensor], Tensor]) -> Nested:
    """Apply ``change`` to every tensor of a nested value; containers are new, plain values shared."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        container = next(container for container in _DICTS.values() if isinstance(value, container))
        return container({key: map_tensors(part, change) for key, part in value.items()})
    if isinstance(value, list | tuple):
        parts = [map_tensors(part, change) for part in value]
        kind = list if isinstance(value, list) else torch.Size if isinstance(value, torch.Size) else tuple
        return kind(parts)
    if isinstance(value, deque):
        return deque((map_tensors(part, change) for part in value), value.maxlen)
    if type(value) in _object_classes and not isinstance(value, Enum):
        mapped = object.__new__(type(value))
        vars(mapped).update(map_tensors(vars(value), change))
        return mapped
    return value


def tensors_of(value: Nested) -> list[Tensor]:
    """List the tensors of a nested value, as `map_tensors` visits them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if type(value) in _object_classes and not isinstance(value, Enum):
        value = list(vars(value).values())
    children = value if isinstance(value, list | tuple | deque) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


def inner_tensors(value: Nested) -> list[Tensor]:
    """Return the tensors that have memory in a nested value, also inside other tensors."""
    inner = list[Tensor]()
    for tensor in tensors_of(value):
        if wraps_tensors(tensor):
            inner += inner_tensors([getattr(tensor, name) for name in flattened(tensor)[0]])
        else:
            parts = (private.indices(tensor), private.values(tensor)) if tensor.is_sparse else (tensor,)
            inner += parts
    return inner
