"""Skeletons of `comm.encoding` in files, with tensors as ``["tensor", [key, strides]]``. No communication."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from torch import Tensor

from zero_optim.comm.encoding import Nested, encode, parts_of, plain_value, rebuilt, tensors_in

Json = Any  # whatever json reads and writes


def key_of(*parts: object) -> str:
    """Join the parts of a key. They are encoded so that no two paths give the same key."""
    return "/".join(quote(part if isinstance(part, str) else f"#{part!r}", safe=" []()") for part in parts)


def pack(key: str, value: object) -> tuple[Json, dict[str, Tensor]]:
    """Split a nested value into JSON and tensors by key, one for the same memory; TypeError if not plain."""
    skeleton, tensors = encode(value, key)
    key_at, parts = dict[tuple[object, ...], str](), dict[str, Tensor]()
    for tensor, (path, body) in zip(tensors, tensors_in(skeleton), strict=True):
        own = "/".join([key, *map(key_of, path)])
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        # Tied weights are written once.
        known = key_at.setdefault(place, own) if tensor.numel() and not tensor.is_meta else own
        if known == own:
            parts[own] = tensor
        body[:] = [known, list(body[2])]
    return skeleton, parts


def unpack(value: Json, get: Callable[[str, tuple[int, ...]], Tensor]) -> Nested:
    """Rebuild what `pack` split. ``get`` returns the tensor of a key, with the given strides."""
    return rebuilt(value, lambda body: get(body[0], tuple(body[1])))


def kinds_in(value: Json) -> set[str]:
    """List the kinds of values in a packed value."""
    return {value[0]}.union(*(kinds_in(part) for _, part in parts_of(value)))


def entries_in(value: Json) -> dict[Any, str]:
    """List the tensors that are directly in a packed dict: name -> key; none if it is no dict."""
    kind, body = value
    parts = body if kind in ("dict", "ordered", "counter") else []
    return {plain_value(name): place[0] for name, (inner, place) in parts if inner == "tensor"}
