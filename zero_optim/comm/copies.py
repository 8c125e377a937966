"""The memory of tensors as bytes, in pieces of bounded size, and copies of it. Nothing here communicates."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_optim.comm.encoding import Skeleton, blank_tensors
from zero_optim.compat import private
from zero_optim.compat.engine import wraps_tensors
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.plan.memory import dense_strides

PIECE_NBYTES = 16 * 2**20


def memory_of(tensor: Tensor) -> Tensor:
    """View a tensor's memory as 1-D bytes, in the order of its strides; a copy if it is not dense."""
    dense = dense_strides(tensor)
    held = tensor.detach().resolve_conj().resolve_neg()
    if held.stride() != dense:
        held = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype, device=tensor.device).copy_(held)
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def pieces_of(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut several memories into pieces of at most `PIECE_NBYTES`: lists of (index, start, stop).

    Small memories share a piece; a large one is cut. Sender and receiver derive the same pieces.
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


def pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    """Copy the memory of tensors, on any devices, into 1-D bytes on the CPU, one after the other.

    The CPU waits for tensors on an accelerator. These come by way of pinned memory, piece by piece.
    """
    memories = [memory_of(tensor) for tensor in tensors]
    if not into.numel():
        return
    if all(memory.device.type == "cpu" for memory in memories):
        torch.cat(memories, out=into)
        return
    start = 0
    for piece in pieces_of([memory.numel() for memory in memories]):
        came = HostCopy(*(memories[index][first:last] for index, first, last in piece)).read()
        into[start : start + came.numel()].copy_(came)
        start += came.numel()


def unpack(skeleton: Skeleton, packed: Tensor) -> list[Tensor]:
    """Allocate the tensors that a skeleton describes, with the memory that `pack` has copied."""
    tensors = blank_tensors(skeleton)
    memories = [memory_of(tensor) for tensor in tensors]
    private.foreach_copy_(memories, list(torch.split(packed, [memory.numel() for memory in memories])))
    return tensors


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, and the attributes of a subclass, detached from autograd."""
    return _like(tensor, tensor.detach().clone())


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor as `copied` does, into CPU memory."""
    return copied(tensor) if tensor.device.type == "cpu" else _like(tensor, tensor.detach().cpu())


def all_copied_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy plain dense tensors with their strides into CPU memory, those of an accelerator piece by piece.

    Each piece, of at most `PIECE_NBYTES`, comes to pinned memory first, and the CPU waits for it once. The
    copies are in ordinary memory: PyTorch rounds a pinned tensor up to a power of two, and keeps its memory.
    """
    copies = [
        torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, device="cpu")
        if is_asynchronous(tensor.device)
        else tensor.detach().to("cpu", copy=True)
        for tensor in tensors
    ]
    staged = [i for i, tensor in enumerate(tensors) if is_asynchronous(tensor.device)]
    sources, targets = ([memory_of(held[i]) for i in staged] for held in (tensors, copies))
    for piece in pieces_of([memory.numel() for memory in sources]):
        came = HostCopy(*(sources[i][start:stop] for i, start, stop in piece)).read()
        places = [targets[i][start:stop] for i, start, stop in piece]
        private.foreach_copy_(places, list(torch.split(came, [place.numel() for place in places])))
        del came  # its memory serves the next piece
    return copies


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not wraps_tensors(tensor):
        vars(copy).update(vars(tensor))
    return copy
