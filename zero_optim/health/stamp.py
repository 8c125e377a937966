"""Stamps: what each rank tells the others, how it travels, and the error from those of all ranks."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from zero_optim.comm.frames import bytes_to_tensor, ranks_by_value, ranks_text, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, copy_to, is_asynchronous
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.plan.layout import Span
from zero_optim.plan.option_values import DIGEST_NBYTES

STAMP_NBYTES = 32  # in a row; between replicas more, of the text
_MARK, _MARKS = struct.Struct("<H"), 2**16
Read: TypeAlias = Callable[[HostCopy], Tensor]
Header: TypeAlias = tuple[int, Tensor]  # a rank, and space for its stamp, as bytes
# As `send_stamp`, of one stamp.
Send: TypeAlias = Callable[[Sequence[Header], int], Callable[[], None]]
_FORM = struct.Struct(f"<H?xI{DIGEST_NBYTES}s")  # before the text


class Stamp(NamedTuple):
    """What one rank tells of its last call.

    ``mark``: see `unit_stamps`. ``number``: of calls. ``digest``: of the options. ``text``: the call's name;
    if it ``has_failed`` the exception's class, perhaps its message.
    """

    mark: int
    has_failed: bool = False
    number: int = 0
    digest: bytes = b""
    text: bytes = b""

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


def headers_in(flat: Tensor, rooms: Sequence[Span]) -> list[Header]:
    """View the header spaces of a flat tensor, as bytes."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    return [(room.owner, octets[room.start * size :][:STAMP_NBYTES]) for room in rooms]


def send_stamp(
    mine: bytes, take: Callable[["Arrival"], None], headers: Sequence[Header], rank: int
) -> Callable[[], None]:
    """Write this rank's stamp into its header space in a gather; the result then gives all to ``take``."""
    for owner, place in headers:
        if owner == rank:
            copy_to(place, bytes_to_tensor(mine))
    if not headers:
        return lambda: None
    ranks, places = zip(*headers, strict=True)
    return lambda: take(Arrival(ranks, torch.cat(places), mine))


class Arrival:
    """The stamps of one gather, on their way to the CPU, and this rank's own; ``rows`` are uint8."""

    def __init__(self, ranks: Sequence[int], rows: Tensor, mine: bytes) -> None:
        self.mine = mine
        self._ranks = ranks
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
        return self._octets == self.mine * len(self._ranks)

    def read_stamps(self, read: Read) -> dict[int, Stamp]:
        """Return each rank's stamp; ``read`` waits."""
        if self.read_uniform(read):  # as nearly always
            return dict.fromkeys(self._ranks, Stamp.read(self.mine))
        octets, length = self._octets, len(self.mine)
        each = (octets[start : start + length] for start in range(0, len(octets), length))
        return dict(zip(self._ranks, map(Stamp.read, each), strict=True))


class Arrivals(list[Arrival]):
    """The stamps of several gathers."""

    @property
    def are_here(self) -> bool:
        """Whether the CPU would not wait."""
        return all(arrival.is_here for arrival in self)

    def read_uniform(self, read: Read) -> bool:
        """Wait with ``read``; return whether each rank sent the same as this one in each gather."""
        return all(arrival.read_uniform(read) for arrival in self)

    def read_stamps(self, read: Read) -> dict[int, Stamp]:
        """Return each rank's last stamp, or one with a failure; ``read`` waits."""
        stamps: dict[int, Stamp] = {}
        for arrival in self:
            for rank, stamp in arrival.read_stamps(read).items():
                if rank not in stamps or not stamps[rank].has_failed:
                    stamps[rank] = stamp
        return stamps


def find_error(
    stamps: Mapping[int, Stamp], numbers: Sequence[int], call: str
) -> RankMismatchError | RemoteRankError | None:
    """Compare all ranks' stamps of a call, "" of their last calls; return the error, failures first.

    It names cause and ranks. None of last calls if every rank has failed: it has raised its own.
    """
    named = {numbers[rank]: stamp for rank, stamp in sorted(stamps.items())}
    failed = [f"rank {rank} failed with {stamp.name}" for rank, stamp in named.items() if stamp.has_failed]
    if failed:
        call = next((stamp.name for stamp in named.values() if not stamp.has_failed), call)
        return RemoteRankError(f"{'; '.join(failed)} in {call}; its own output has more") if call else None
    parts = parted(named, "number", "text")
    each = "; ".join((_present_call if call else _last_call)(*part) for part in parts)
    made, calls = ("are in", "the same calls") if call else ("have made", "the same")
    different = f"ranks {made} different calls of the optimizer: {each}. All ranks must make {calls}"
    return RankMismatchError(different) if parts else None


def parted(stamps: Mapping[int, Stamp], *fields: str) -> list[tuple[list[int], Stamp]]:
    """Group ranks by fields of their stamps, the largest group first; empty if they are all equal."""
    values = {rank: tuple(getattr(stamp, name) for name in fields) for rank, stamp in stamps.items()}
    groups = sorted(ranks_by_value(values).values(), key=lambda ranks: -len(ranks))
    return [(ranks, stamps[ranks[0]]) for ranks in groups] if len(groups) > 1 else []


def _present_call(ranks: Sequence[int], stamp: Stamp) -> str:
    call = f"{stamp.name}, call {stamp.number} there" if stamp.text else "a gather that is no step"
    return f"{ranks_text(ranks)} in {call}"


def _last_call(ranks: Sequence[int], stamp: Stamp) -> str:
    last = f", the last one {stamp.name}" if stamp.number else ""
    return f"{ranks_text(ranks)} made {stamp.number}{last}"
