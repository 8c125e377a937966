"""Skeletons of `comm.encoding` as JSON, with tensors as ``["tensor", [key, strides]]``. No communication."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from zero_optim.checkpoint.manifest import dtype_name, dtype_named
from zero_optim.comm.encoding import Nested, decode, encode, parts_of

Json = Any  # whatever json reads and writes
_Path = tuple[object, ...]
_DICTS = ("dict", "ordered", "counter")
_READERS: Any = {"float": float, "bytes": bytes.fromhex, "dtype": dtype_named, "device": torch.device}


def key_of(*parts: object) -> str:
    """Join the parts of a key. They are encoded so that no two paths give the same key."""
    return "/".join(quote(part if isinstance(part, str) else f"#{part!r}", safe=" []()") for part in parts)


def _mapped(
    node: list[Any], plain: Callable[[Any], Any], tensor: Callable[[_Path, Any], Any], path: _Path = ()
) -> list[Any]:
    """Replace the plain values and the tensors of a skeleton, or of its JSON; tensors come in one order."""
    kind, body = node

    def inner(part: list[Any], *step: object) -> list[Any]:
        return _mapped(part, plain, tensor, (*path, *step))

    if kind == "plain":
        return [kind, plain(body)]
    if kind == "tensor":
        return [kind, tensor(path, body)]
    if kind in _DICTS:
        return [kind, [[plain(key), inner(part, key)] for key, part in body]]
    if kind == "wrapper":
        name, context, form, *parts = body
        return [kind, [name, inner(context), form, *([attr, inner(part, attr)] for attr, part in parts)]]
    head = [tuple(body[0])] if kind in ("sparse", "subclass") else []
    return [kind, [*head, *(inner(part, str(number)) for number, part in enumerate(body[len(head) :]))]]


def pack(key: str, value: object) -> tuple[Json, dict[str, Tensor]]:
    """Split a nested value into JSON and tensors by key, one for the same memory; TypeError if not plain."""
    skeleton, tensors = encode(value, key)
    source, key_at, parts = iter(tensors), dict[_Path, str](), dict[str, Tensor]()

    def named(path: _Path, body: list[Any]) -> list[Any]:
        tensor, own = next(source), "/".join([key, *map(key_of, path)])
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        # Tied weights are written once.
        known = key_at.setdefault(place, own) if tensor.numel() and not tensor.is_meta else own
        if known == own:
            parts[own] = tensor
        return [known, list(body[2])]

    return _mapped(skeleton, plain_json, named), parts


def unpack(value: Json, get: Callable[[str, tuple[int, ...]], Tensor]) -> Nested:
    """Rebuild what `pack` split. ``get`` returns the tensor of a key, with the given strides."""
    tensors: list[Tensor] = []
    skeleton = _mapped(value, plain_value, lambda _, body: tensors.append(get(body[0], tuple(body[1]))))
    return decode(skeleton, iter(tensors))


def tensors_in(value: Json) -> dict[str, tuple[int, ...]]:
    """List the tensors that a packed value needs: key -> strides."""
    strides: dict[str, tuple[int, ...]] = {}
    _mapped(value, lambda body: body, lambda _, body: strides.update({body[0]: tuple(body[1])}))
    return strides


def without_arrays(value: Json) -> Json:
    """Replace numpy's arrays by tensors, in plain containers."""
    kind, body = value
    if kind in _DICTS:
        return [kind, [[key, without_arrays(part)] for key, part in body]]
    if kind in ("list", "tuple"):
        return [kind, [without_arrays(part) for part in body]]
    return body[0] if kind == "array" else value


def kinds_in(value: Json) -> set[str]:
    """List the kinds of values in a packed value."""
    return {value[0]}.union(*map(kinds_in, parts_of(value)))


def entries_in(value: Json) -> dict[Any, str]:
    """List the tensors that are directly in a packed dict: name -> key; none if it is no dict."""
    kind, body = value
    parts = body if kind in _DICTS else []
    return {plain_value(name): place[0] for name, (inner, place) in parts if inner == "tensor"}


def plain_json(value: object) -> Json:
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


def plain_value(value: Json) -> Any:  # noqa: ANN401 - whatever was spelled
    """Read what `plain_json` wrote."""
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "complex":
        return complex(*map(plain_value, body))
    return _READERS[kind](body)
