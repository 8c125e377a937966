"""Compare two values bit for bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_optim.comm.encoding import flattened
from zero_optim.compat.engine import wraps_tensors
from zero_optim.probe.subject import to_hashable


def same(a: object, b: object) -> bool:
    """Compare values bit for bit; objects of other kinds are not compared."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_tensors(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)  # noqa: PLR0124 - NaN
    plain = (bool, int, float, complex, str, bytes, type(None))
    return bool(a == b) if isinstance(a, plain) or isinstance(b, plain) else type(a) is type(b)


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Compare tensors bit for bit: values, dtype, shape. Tensors made of others are compared by these."""
    if wraps_tensors(a) or wraps_tensors(b):
        return type(a) is type(b) and a.shape == b.shape and same(_inside(a), _inside(b))
    return to_hashable(a.to_dense() if a.is_sparse else a) == to_hashable(b.to_dense() if b.is_sparse else b)


def _inside(tensor: Tensor) -> list[object]:
    attributes, context = flattened(tensor)
    return [context, {name: getattr(tensor, name) for name in attributes}]


def same_pieces(whole: object, pieces: Sequence[Any], shape: torch.Size) -> bool:
    """Compare a parameter's state with that of its pieces: only entries of the parameter's shape are cut."""
    if len(pieces) == 1:
        return same(whole, pieces[0])
    if isinstance(whole, Tensor) and whole.shape == shape:
        if wraps_tensors(whole) or not all(isinstance(piece, Tensor) for piece in pieces):
            return False  # nobody knows which part of what it holds belongs to a row
        return same_tensors(whole.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces]))
    if isinstance(whole, Mapping):
        alike = all(isinstance(piece, Mapping) and piece.keys() == whole.keys() for piece in pieces)
        return alike and all(
            same_pieces(value, [piece[key] for piece in pieces], shape) for key, value in whole.items()
        )
    if isinstance(whole, list | tuple):
        alike = all(isinstance(piece, list | tuple) and len(piece) == len(whole) for piece in pieces)
        return alike and all(map(same_pieces, whole, zip(*pieces, strict=True), [shape] * len(whole)))
    return all(same(whole, piece) for piece in pieces)
