"""Nested values with tensors, sent from one rank to another without pickle.

A value is split in two. Its skeleton (containers, plain values, and for each tensor its dtype,
shape and strides) travels as bytes that ``torch.load(weights_only=True)`` reads, which cannot run
code. The tensors' memory follows in pieces of bounded size, so that neither side needs a second
copy of the whole.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_optim.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.plan import dense_strides

PIECE_NBYTES = 16 * 2**20
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

Skeleton = list[Any]
Nested = Any  # dicts, lists and tuples of tensors and plain values


def encode(value: object, where: str) -> tuple[Skeleton, list[Tensor]]:
    """Split a nested value into a skeleton of plain values and its tensors.

    Args:
        value: dicts, lists, tuples, dense tensors, numbers, strings, None, nested at will.
        where: what the value is, for the message.

    Raises:
        TypeError: something in it is none of these.
    """
    tensors: list[Tensor] = []
    return _encode(value, where, tensors), tensors


def _encode(value: object, where: str, tensors: list[Tensor]) -> Skeleton:
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, dict):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return [kind, [[_plain(k, where), _encode(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]]
    return ["plain", _plain(value, where)]


def _plain(value: object, where: str) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in _PLAIN:
        raise TypeError(
            f"{where} holds a {type(value).__name__}, which cannot be sent without running its code"
        )
    return value


def _encode_tensor(tensor: Tensor, where: str, tensors: list[Tensor]) -> Skeleton:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise TypeError(f"{where} is a {type(tensor).__name__}, a tensor subclass, which cannot be sent")
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [_encode_tensor(part, where, tensors) for part in (tensor.indices(), tensor.values())]
        return ["sparse", [tuple(tensor.shape), *parts]]
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a tensor of layout {tensor.layout}, which is not supported")
    strides = dense_strides(tensor)
    tensors.append(tensor)
    return ["tensor", [tensor.dtype, tuple(tensor.shape), strides]]


def decode(skeleton: Skeleton, tensors: Iterator[Tensor]) -> Nested:
    """Put a value together again from its skeleton and its tensors, in order."""
    kind, body = skeleton
    if kind == "plain":
        return body
    if kind == "tensor":
        return next(tensors)
    if kind == "sparse":
        shape, indices, values = body
        return torch.sparse_coo_tensor(
            decode(indices, tensors), decode(values, tensors), shape, check_invariants=True, is_coalesced=True
        )
    if kind in ("dict", "ordered"):
        pairs = [(key, decode(part, tensors)) for key, part in body]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    items = [decode(part, tensors) for part in body]
    return items if kind == "list" else tuple(items)


def blank_tensors(skeleton: Skeleton) -> list[Tensor]:
    """Allocate on the CPU, uninitialised, the tensors that a skeleton speaks of."""
    kind, body = skeleton
    if kind == "plain":
        return []
    if kind == "tensor":
        dtype, shape, strides = body
        return [torch.empty_strided(shape, strides, dtype=dtype)]
    parts = (
        body[1:] if kind == "sparse" else [part for _, part in body] if kind in ("dict", "ordered") else body
    )
    return [tensor for part in parts for tensor in blank_tensors(part)]


def memory_of(tensor: Tensor) -> Tensor:
    """View a dense tensor's memory as 1-D bytes, in the order of its strides; copies if not dense."""
    dense = dense_strides(tensor)
    held = tensor.detach().resolve_conj().resolve_neg()
    if held.stride() != dense:
        held = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype, device=tensor.device).copy_(held)
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def send_value(group: RankGroup, to: int, skeleton: Skeleton, tensors: list[Tensor]) -> None:
    """Send an encoded value; the other rank calls `recv_value`. Blocks until it is received.

    Memory: one piece beyond the tensors themselves.
    """
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    header = bytes_to_tensor(buffer.getvalue())
    group.send(torch.tensor([header.numel()]), to)
    group.send(header, to)
    memories = [memory_of(tensor) for tensor in tensors]
    for piece in _pieces([memory.numel() for memory in memories]):
        parts = [memories[index][start:stop] for index, start, stop in piece]
        # Brought to one device first: Adam on CUDA keeps its step counts on the CPU.
        group.send(parts[0] if len(parts) == 1 else torch.cat([part.to(group.device) for part in parts]), to)


def recv_value(group: RankGroup, source: int) -> Nested:
    """Receive a value into CPU memory. Memory: one piece beyond the result."""
    length = torch.zeros(1, dtype=torch.int64)
    group.recv(length, source)
    header = torch.empty(int(length), dtype=torch.uint8)
    group.recv(header, source)
    skeleton = torch.load(io.BytesIO(tensor_to_bytes(header)), weights_only=True)
    tensors = blank_tensors(skeleton)
    memories = [memory_of(tensor) for tensor in tensors]
    for piece in _pieces([memory.numel() for memory in memories]):
        _recv_piece(group, source, [memories[index][start:stop] for index, start, stop in piece])
    return decode(skeleton, iter(tensors))


def _recv_piece(group: RankGroup, source: int, parts: list[Tensor]) -> None:
    if len(parts) == 1:
        group.recv(parts[0], source)
        return
    received = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8)
    group.recv(received, source)
    torch._foreach_copy_(parts, list(torch.split(received, [part.numel() for part in parts])))


def _pieces(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut a row of memories into pieces of at most `PIECE_NBYTES`: lists of (index, start, stop).

    Small memories share a piece; a large one is cut. Both ends derive the same pieces.
    """
    piece: list[tuple[int, int, int]] = []
    room = PIECE_NBYTES
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            piece.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], PIECE_NBYTES
    if piece:
        yield piece


def map_tensors(value: Nested, change: Callable[[Tensor], Tensor]) -> Nested:
    """Rebuild a nested value with every tensor changed; containers are new, plain values shared."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        pairs = [(key, map_tensors(part, change)) for key, part in value.items()]
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    if isinstance(value, list | tuple):
        parts = [map_tensors(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, out of autograd's sight."""
    return tensor.detach().clone()
