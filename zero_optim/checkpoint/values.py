"""Nested values as JSON and named tensors, and back.

The form is that of `wire`'s skeletons. Plain values are in JSON, and a tensor is ``["tensor", [key,
strides]]``. Nothing here communicates.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from zero_optim.checkpoint.manifest import dtype_named
from zero_optim.comm.encoding import Nested, Skeleton, decode, encode

Json = Any  # whatever json reads and writes
_DICTS = ("dict", "ordered", "counter")


def key_of(*parts: object) -> str:
    """Join the parts of a key. They are encoded so that no two paths give the same key."""
    return "/".join(quote(part if isinstance(part, str) else f"#{part!r}", safe=" []()") for part in parts)


def pack(key: str, value: object, where: str) -> tuple[Json, dict[str, Tensor]]:
    """Split a nested value into JSON and tensors.

    Args:
        key: of the value; the tensors' keys begin with it.
        value: as `comm.encoding.encode` takes it.
        where: what it is, for error messages.

    Returns:
        The JSON, and the tensors by key. Tensors with the same memory have one key.

    Raises:
        TypeError: something in it is neither a tensor nor plain.
    """
    skeleton, tensors = encode(value, where)
    packer = _Packer(tensors)
    return packer.json(skeleton, key), packer.found


class _Packer:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = iter(tensors)
        self._keys: dict[tuple[object, ...], str] = {}
        self.found: dict[str, Tensor] = {}

    def json(self, skeleton: Skeleton, key: str) -> Json:  # noqa: PLR0911 - one a kind
        kind, body = skeleton
        if kind == "plain":
            return [kind, plain_json(body)]
        if kind == "tensor":
            return [kind, [self._key(next(self._tensors), key), list(body[2])]]
        if kind in _DICTS:
            return [kind, [[plain_json(k), self.json(part, f"{key}/{key_of(k)}")] for k, part in body]]
        if kind == "sparse":
            return [kind, [list(body[0]), *self._row(body[1:], key)]]
        if kind == "subclass":
            return [kind, [body[0], *self._row(body[1:], key)]]
        if kind == "wrapper":
            name, context, (shape, strides), *parts = body
            inner = [[attribute, self.json(part, f"{key}/{key_of(attribute)}")] for attribute, part in parts]
            return [kind, [name, self.json(context, key), [list(shape), list(strides)], *inner]]
        return [kind, self._row(body, key)]

    def _row(self, parts: list[Skeleton], key: str) -> list[Json]:
        return [self.json(part, f"{key}/{number}") for number, part in enumerate(parts)]

    def _key(self, tensor: Tensor, key: str) -> str:
        """Return the key of a tensor; tied weights have one key and are written once."""
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        known = self._keys.setdefault(place, key) if tensor.numel() and not tensor.is_meta else key
        if known == key:
            self.found[key] = tensor
        return known


def tensors_in(value: Json) -> dict[str, tuple[int, ...]]:
    """List the tensors that a packed value needs: key -> strides."""
    kind, body = value
    if kind == "plain":
        return {}
    if kind == "tensor":
        return {body[0]: tuple(body[1])}
    parts = body
    if kind in _DICTS:
        parts = [part for _, part in body]
    elif kind in ("sparse", "subclass"):
        parts = body[1:]
    elif kind == "wrapper":
        parts = [part for _, part in body[3:]]
    return {key: strides for part in parts for key, strides in tensors_in(part).items()}


def entries_in(value: Json) -> dict[Any, str]:
    """List the tensors that are directly in a packed dict: name -> key; none if it is no dict."""
    kind, body = value
    parts = body if kind in _DICTS else []
    return {plain_value(name): place[0] for name, (inner, place) in parts if inner == "tensor"}


def unpack(value: Json, get: Callable[[str, tuple[int, ...]], Tensor]) -> Nested:
    """Rebuild a packed value.

    Args:
        value: what `pack` returned.
        get: returns the tensor of a key, with the given strides.

    Raises:
        TypeError: it needs a tensor subclass that is not imported here.
    """
    tensors: list[Tensor] = []
    return decode(_skeleton(value, get, tensors), iter(tensors))


def _skeleton(value: Json, get: Callable[[str, tuple[int, ...]], Tensor], tensors: list[Tensor]) -> Skeleton:
    kind, body = value

    def row(parts: list[Json]) -> list[Skeleton]:
        return [_skeleton(part, get, tensors) for part in parts]

    if kind == "plain":
        return [kind, plain_value(body)]
    if kind == "tensor":
        tensors.append(get(body[0], tuple(body[1])))
        return [kind, None]
    if kind in _DICTS:
        return [kind, [[plain_value(key), _skeleton(part, get, tensors)] for key, part in body]]
    if kind in ("sparse", "subclass"):
        return [kind, [tuple(body[0]), *row(body[1:])]]
    if kind == "wrapper":
        name, context, form, *parts = body
        inner = [[attribute, _skeleton(part, get, tensors)] for attribute, part in parts]
        return [kind, [name, _skeleton(context, get, tensors), form, *inner]]
    return [kind, row(body)]


def plain_json(value: object) -> Json:
    """Write a plain value in JSON. What JSON lacks becomes an object with one entry, named after its type."""
    if isinstance(value, float):
        return value if value - value == 0 else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [plain_json(value.real), plain_json(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"device": str(value)} if isinstance(value, torch.device) else value


def plain_value(value: Json) -> Any:  # noqa: ANN401 - whatever was spelled
    """Read what `plain_json` wrote."""
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "complex":
        return complex(*map(plain_value, body))
    readers: dict[str, Callable[[str], Any]] = {
        "float": float,
        "bytes": bytes.fromhex,
        "dtype": dtype_named,
        "device": torch.device,
    }
    return readers[kind](body)
