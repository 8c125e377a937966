"""Send nested values with tensors from one rank to another without pickle.

The skeleton of a value travels first, see `comm.encoding`. The tensors' memory follows in pieces of bounded
size, so neither side needs a second copy of the whole.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.copies import memory_of, pieces_of
from zero_optim.comm.encoding import (
    Nested,
    Place,
    Skeleton,
    blank_tensors,
    decode,
    new_memory,
    skeleton_from_bytes,
    skeleton_to_bytes,
)
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy


def send_value(group: RankGroup, to: Sequence[int], skeleton: Skeleton, tensors: list[Tensor]) -> None:
    """Send an encoded value to some ranks, which call `recv_value` or `recv_encoded`.

    Waits as `RankGroup.send` does. Needs memory for one piece beyond the tensors themselves.
    """
    header = bytes_to_tensor(skeleton_to_bytes(skeleton))
    group.send(torch.tensor([header.numel()]), *to)
    group.send(header, *to)
    memories = [memory_of(tensor) for tensor in tensors]
    for piece in pieces_of([memory.numel() for memory in memories]):
        parts = [memories[index][start:stop] for index, start, stop in piece]
        group.send(_joined(parts, group.device), *to)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Make one tensor of a piece, on the device that it is sent from. Parts may lie on several devices.

    Adam on CUDA keeps its step counts on the CPU.
    """
    if device.type == "cpu" and any(part.device != device for part in parts):
        return HostCopy(*parts).read()
    return parts[0] if len(parts) == 1 else torch.cat([part.to(device) for part in parts])


def recv_value(group: RankGroup, source: int, advance: Callable[[int], object] = int) -> Nested:
    """Receive a value as `recv_encoded` does, and decode it.

    Raises:
        TypeError: as `decode` does, on this rank alone. Where a value may hold a tensor subclass, use
            `recv_encoded`, and decode when nobody waits for this rank.
    """
    skeleton, tensors = recv_encoded(group, source, advance)
    return decode(skeleton, iter(tensors))


def recv_encoded(
    group: RankGroup, source: int, advance: Callable[[int], object] = int, place: Place = new_memory
) -> tuple[Skeleton, list[Tensor]]:
    """Receive a value into CPU memory, for `decode`. Needs memory for one piece beyond the result.

    Args:
        group: the ranks.
        source: the rank that sends.
        advance: called after each piece with its number of bytes.
        place: returns the memory to receive a tensor into, on the CPU, with the strides that it is given.
    """
    length = torch.zeros(1, dtype=torch.int64)
    group.recv(length, source)
    header = torch.empty(int(length), dtype=torch.uint8)
    group.recv(header, source)
    skeleton = skeleton_from_bytes(tensor_to_bytes(header))
    tensors = blank_tensors(skeleton, place)
    memories = [memory_of(tensor) for tensor in tensors]
    for piece in pieces_of([memory.numel() for memory in memories]):
        _recv_piece(group, source, [memories[index][start:stop] for index, start, stop in piece])
        advance(sum(stop - start for _, start, stop in piece))
    return skeleton, tensors


def _recv_piece(group: RankGroup, source: int, parts: list[Tensor]) -> None:
    if len(parts) == 1:
        group.recv(parts[0], source)
        return
    received = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8)
    group.recv(received, source)
    private.foreach_copy_(parts, list(torch.split(received, [part.numel() for part in parts])))
