"""Frames of short messages, and texts about ranks. No communication."""

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Hashable)

SHORT = 47  # bytes: a digest
_MANY = 128  # ranks, which are no longer all named


def framed(message: bytes) -> bytes:
    """Frame a short message: its length, then its bytes."""
    return bytes([len(message)]) + message.ljust(SHORT, b"\0")


def unframed(frames: Sequence[bytes]) -> list[bytes] | None:
    """Return the framed messages of all ranks; None if they differ in length."""
    length = frames[0][0]
    return [frame[1 : 1 + length] for frame in frames] if {frame[0] for frame in frames} == {length} else None


def ranks_text(ranks: Sequence[int], noun: str = "rank") -> str:
    """Name ranks, or replicas: "rank 1", "ranks 0, 2"; of very many the first and their number."""
    if len(ranks) > _MANY:
        return f"{noun}s {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"{noun}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Group ranks by their values."""
    groups: dict[T, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def values_text(held: Mapping[str, Sequence[int]]) -> str:
    """Describe values by the ranks that have them, from `ranks_by_value`."""
    return "; ".join(f"{ranks_text(ranks)} has {value}" for value, ranks in held.items())


def differences(counts: Mapping[int, Mapping[str, int]]) -> list[str]:
    """Describe calls that some ranks began more often, from counts by rank and name."""
    texts = []
    for name in sorted(set[str]().union(*counts.values())):
        groups = ranks_by_value({rank: of_rank.get(name, 0) for rank, of_rank in counts.items()})
        if len(groups) > 1:
            each = " and ".join(f"{count} on {ranks_text(ranks)}" for count, ranks in groups.items())
            texts.append(f"times of {name}: {each}")
    return texts


def met_otherwise(reports: Mapping[int, tuple[Mapping[str, int], Sequence[str]]]) -> str:
    """Describe ranks in different calls, from their counts and open calls."""
    inside = ", ".join(f"rank {rank} is in {name}" for rank, (_, names) in reports.items() for name in names)
    known = [inside] * bool(inside) + differences({rank: counts for rank, (counts, _) in reports.items()})
    what = f": {'; '.join(known)}" if known else ""
    return f"ranks have made different calls{what}. All ranks must make the same calls, in the same order"


def bytes_to_tensor(payload: bytes) -> Tensor:
    """Copy bytes into a 1-D uint8 tensor on the CPU."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Copy a uint8 tensor into bytes."""
    # Not by NumPy: PyTorch resizes no storage that it has seen, and units empty theirs.
    here = tensor.cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.numel())
