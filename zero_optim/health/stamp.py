"""Stamps: what each rank tells the others, how it travels, and the error from those of all ranks."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from zero_optim.comm.frames import bytes_to_tensor, ranks_by_value, ranks_text, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, copy_to, is_asynchronous
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.plan.option_values import DIGEST_NBYTES

STAMP_NBYTES = 32  # between ranks of a replica; between replicas more, of the text
_MARK, _MARKS = struct.Struct("<H"), 2**16
Read: TypeAlias = Callable[[HostCopy], Tensor]
_FORM = struct.Struct(f"<H?xI{DIGEST_NBYTES}s")  # before the text


class Stamp(NamedTuple):
    """What one rank tells of its last call."""

    mark: int  # see `unit_stamps`
    has_failed: bool = False
    number: int = 0  # of calls
    digest: bytes = b""  # of the options
    text: bytes = b""  # the call's name; if it failed the exception's class, perhaps its message

    @property
    def name(self) -> str:
        """The text."""
        return self.text.decode(errors="ignore")

    @classmethod
    def read(cls, octets: bytes) -> "Stamp":
        """Read a stamp of any length."""
        mark, has_failed, number, digest = _FORM.unpack_from(octets.ljust(_FORM.size, b"\0"))
        return cls(mark, has_failed, number, digest, octets[_FORM.size :].rstrip(b"\0"))

    def packed(self, nbytes: int = STAMP_NBYTES) -> bytes:
        """Return the first bytes; zeros follow a short text."""
        octets: bytes = _FORM.pack(*self[:-1]) + self.text
        return octets.ljust(nbytes, b"\0")[:nbytes]


def marked(octets: bytes, mark: int) -> bytes:
    """Return a stamp's bytes with this mark, modulo 2**16."""
    return _MARK.pack(mark % _MARKS) + octets[_MARK.size :]


class Arrival:
    """The stamps of all ranks, on their way to the CPU, and this rank's own; ``rows`` are uint8."""

    def __init__(self, rows: Tensor, mine: bytes) -> None:
        self.mine = mine
        self._copy = HostCopy(rows) if is_asynchronous(rows.device) else None
        self._octets = tensor_to_bytes(rows) if self._copy is None else b""

    @property
    def is_here(self) -> bool:
        """Whether the CPU would not wait."""
        return self._copy is None or self._copy.is_here

    def read_uniform(self, read: Read) -> bool:
        """Wait with ``read``; return whether each rank sent the same as this one."""
        if self._copy is not None:
            self._octets, self._copy = tensor_to_bytes(read(self._copy)), None
        return self._octets == self.mine * (len(self._octets) // len(self.mine))

    def read_stamps(self, read: Read) -> dict[int, Stamp]:
        """Return each rank's stamp; ``read`` waits."""
        self.read_uniform(read)
        octets, length = self._octets, len(self.mine)
        each = (octets[start : start + length] for start in range(0, len(octets), length))
        return dict(enumerate(map(Stamp.read, each)))


class Header(NamedTuple):
    """A rank's stamp, which goes with a gather, and what takes the stamps of all."""

    mine: bytes
    take: Callable[[Arrival], None]
    row: Tensor | None = None  # ``mine`` on a device, where it is there already

    def read(self, rows: Tensor, _: object = None) -> None:
        """Take the stamps of all ranks, which have come."""
        self.take(Arrival(rows, self.mine))

    def written(self, size: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a row for each rank, and this rank's, which is written."""
        rows = torch.empty(size, len(self.mine), dtype=torch.uint8, device=device)
        if self.row is not None:
            return rows, self.row
        copy_to(rows[rank], bytes_to_tensor(self.mine))
        return rows, rows[rank]


def find_error(
    stamps: Mapping[int, Stamp], numbers: Sequence[int], call: str
) -> RankMismatchError | RemoteRankError | None:
    """Return the error of a call, "" for last calls, of which every rank may have raised its own."""
    named = {numbers[rank]: stamp for rank, stamp in sorted(stamps.items())}
    failed = [f"rank {rank} failed with {stamp.name}" for rank, stamp in named.items() if stamp.has_failed]
    if failed:
        call = next((stamp.name for stamp in named.values() if not stamp.has_failed), call)
        return RemoteRankError(f"{'; '.join(failed)} in {call}; its own output has more") if call else None
    parts = parted(named, "number", "text")
    each = "; ".join(_call_text(*part, is_last=not call) for part in parts)
    made, calls = ("are in", "the same calls") if call else ("have made", "the same")
    different = f"ranks {made} different calls of the optimizer: {each}. All ranks must make {calls}"
    return RankMismatchError(different) if parts else None


def parted(stamps: Mapping[int, Stamp], *fields: str) -> list[tuple[list[int], Stamp]]:
    """Group ranks by fields of their stamps, the largest group first; empty if they are all equal."""
    values = {rank: tuple(getattr(stamp, name) for name in fields) for rank, stamp in stamps.items()}
    groups = sorted(ranks_by_value(values).values(), key=lambda ranks: -len(ranks))
    return [(ranks, stamps[ranks[0]]) for ranks in groups] if len(groups) > 1 else []


def _call_text(ranks: Sequence[int], stamp: Stamp, *, is_last: bool) -> str:
    call = f"in {stamp.name}, call {stamp.number} there" if stamp.text else "in a gather outside of step()"
    if is_last:
        call = f"made {stamp.number}" + f", the last one {stamp.name}" * bool(stamp.number)
    return f"{ranks_text(ranks)} {call}"
