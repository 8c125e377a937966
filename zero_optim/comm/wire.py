"""Nested values sent between ranks without pickle: a skeleton, then tensors' memory in bounded pieces."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Skeleton, dtype_named, rewrapped, tensors_in
from zero_optim.comm.frames import bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.sending import recv, send
from zero_optim.compat import private
from zero_optim.compat.autograd import wraps_tensors
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.plan.strides import dense_strides

PIECE_NBYTES = 16 * 2**20


def memory_of(tensor: Tensor) -> Tensor:
    """View a tensor's memory as 1-D bytes, in the order of its strides; a copy if it is not dense."""
    dense = dense_strides(tensor)
    held = tensor.detach().resolve_conj().resolve_neg()
    if held.stride() != dense:
        held = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype, device=tensor.device).copy_(held)
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def pieces_of(memories: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut memories, as bytes, into pieces of `PIECE_NBYTES`, lists of views; equal on all ranks."""
    piece: list[Tensor] = []
    room = PIECE_NBYTES
    for memory in memories:
        start = 0
        while start < memory.numel():
            piece.append(memory[start : start + room])
            room -= piece[-1].numel()
            start += piece[-1].numel()
            if room == 0:
                yield piece
                piece, room = [], PIECE_NBYTES
    if piece:
        yield piece


def pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    """Copy tensors on any devices into 1-D CPU bytes, by way of pinned pieces."""
    memories = [memory_of(tensor) for tensor in tensors]
    _copy(memories, torch.split(into, [memory.numel() for memory in memories]))


def all_copied_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy plain dense tensors with their strides to the CPU, by way of pinned pieces."""
    copies = [
        torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, device="cpu")
        for tensor in tensors
    ]
    _copy(map(memory_of, tensors), map(memory_of, copies))
    return copies


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy memories to others of the CPU."""
    for piece, places in zip(pieces_of(sources), pieces_of(targets), strict=True):
        parts = piece
        if any(is_asynchronous(part.device) for part in piece):
            parts = list(torch.split(HostCopy(*piece).read(), [place.numel() for place in places]))
        private.foreach_copy_(places, parts)
        del parts  # whose pinned memory serves the next piece


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Copy a tensor with its strides and a subclass's attributes, detached; to another device if given."""
    if wraps_tensors(tensor):
        return rewrapped(tensor, partial(copied, device=device))  # not all of these classes have a clone()
    copy = tensor.detach()
    copy = copy.clone() if device in (None, tensor.device) else copy.to(device)
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        vars(copy).update(vars(tensor))
    return copy


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor as `copied` does, into CPU memory."""
    return copied(tensor, torch.device("cpu"))


def send_value(group: RankGroup, to: Sequence[int], skeleton: Skeleton, tensors: list[Tensor]) -> None:
    """Send an encoded value to ranks that call `recv_encoded`."""
    header = bytes_to_tensor(json.dumps(skeleton, separators=(",", ":")).encode())
    send(group, torch.tensor([header.numel()], device="cpu"), *to)
    send(group, header, *to)
    for piece in pieces_of([memory_of(tensor) for tensor in tensors]):
        send(group, _joined(piece, group.device), *to)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Join a piece's parts, perhaps of several devices (Adam's), on the sending device."""
    if device.type == "cpu" and any(part.device != device for part in parts):
        return HostCopy(*parts).read()
    return parts[0] if len(parts) == 1 else torch.cat([part.to(device) for part in parts])


def recv_encoded(group: RankGroup, source: int) -> tuple[Skeleton, list[Tensor]]:
    """Receive a value into new CPU memory, for `decode`."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    recv(group, length, source)
    header = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    recv(group, header, source)
    skeleton = json.loads(tensor_to_bytes(header))
    tensors = [
        torch.empty_strided(shape, strides, dtype=dtype_named(dtype), device="cpu")
        for _, (dtype, shape, strides) in tensors_in(skeleton)
    ]
    for parts in pieces_of([memory_of(tensor) for tensor in tensors]):
        sizes = [part.numel() for part in parts]
        received = parts[0] if len(parts) == 1 else torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        recv(group, received, source)
        if len(parts) > 1:
            private.foreach_copy_(parts, list(torch.split(received, sizes)))
    return skeleton, tensors
