"""The 32-byte stamp of one rank, and the errors that the ranks' stamps amount to."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_optim.comm.collectives import tensor_to_bytes
from zero_optim.comm.frames import ranks_text
from zero_optim.compat.streams import HostCopy, copy_to, is_asynchronous
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.plan.layout import Span
from zero_optim.plan.option_values import DIGEST_NBYTES

STAMP_NBYTES = 32
MARK, MARK_NBYTES = 2, 2  # where the mark is in a stamp
_FORM = struct.Struct(f"<BBHI{DIGEST_NBYTES}s16s")
_STEP, _FAILED = 1, 1


class Stamp(NamedTuple):
    """What one rank tells in a gather.

    ``kind``: 1 for a call that gathers changed parameters, 0 for no stamp. ``flags``: 1 if the call raised.
    ``mark``: of a unit's gather, see `zero_optim.health.unit_stamps`. ``number``: of the call on that rank.
    ``digest``: of the options. ``text``: the call, or the class of the exception, cut to 16 bytes.
    """

    kind: int
    flags: int
    mark: int
    number: int
    digest: bytes
    text: bytes

    @classmethod
    def of(cls, number: int, digest: bytes, name: str, failed: str | None) -> "Stamp":
        """Build the stamp of a call; ``failed``: the class of its exception, or None."""
        text, flags = (name, 0) if failed is None else (failed, _FAILED)
        return cls(_STEP, flags, 0, number % 2**32, digest, text.encode()[:16])

    @property
    def has_failed(self) -> bool:
        """Whether the call raised on that rank."""
        return bool(self.flags & _FAILED)

    @property
    def name(self) -> str:
        """The text."""
        return self.text.rstrip(b"\0").decode(errors="replace")

    @classmethod
    def read(cls, octets: bytes) -> "Stamp":
        """Read 32 bytes."""
        return cls(*_FORM.unpack(octets))

    def packed(self) -> bytes:
        """Return the 32 bytes."""
        return _FORM.pack(*self)


assert _FORM.size == STAMP_NBYTES


def write_headers(
    flat: Tensor, rooms: Sequence[Span], rank: int, mine: Tensor, start: int = 0
) -> list[Tensor]:
    """Write this rank's bytes into its header space from ``start``; returns all ranks' places for them."""
    octets, size, length = flat.view(torch.uint8), flat.element_size(), mine.numel()
    places = []
    for room in rooms:
        begin = room.start * size + start
        places.append(octets[begin : begin + length])
        if room.owner == rank:
            copy_to(places[-1], mine)
    return places


class Arrival:
    """The header spaces of one gather, copied to the CPU."""

    def __init__(self, rooms: Sequence[Span], places: Sequence[Tensor]) -> None:
        self._owners = [room.owner for room in rooms]
        self._octets: list[bytes] | None = None
        if not is_asynchronous(places[0].device):
            self._octets = list(map(tensor_to_bytes, places))
        else:
            self._copy = HostCopy(torch.stack(list(places)))

    @property
    def is_here(self) -> bool:
        """Whether the CPU would not wait."""
        return self._octets is not None or self._copy.is_here

    def read(self, read: Callable[[HostCopy], Tensor] = HostCopy.read) -> list[tuple[int, bytes]]:
        """Return each owner and its bytes; ``read`` waits."""
        if self._octets is None:
            self._octets = list(map(tensor_to_bytes, read(self._copy)))
        return list(zip(self._owners, self._octets, strict=True))


def failed_ranks(stamps: Mapping[int, Stamp]) -> list[int]:
    """Return the ranks whose call raised."""
    return [rank for rank, stamp in sorted(stamps.items()) if stamp.has_failed]


def failure_elsewhere(call: str, stamps: Mapping[int, Stamp]) -> RemoteRankError:
    """Build the error for ranks that did not fail, where others did."""
    told = "; ".join(f"rank {rank} failed with {stamps[rank].name}" for rank in failed_ranks(stamps))
    return RemoteRankError(f"{told} in {call}; its own output has more")


def _by_call(stamps: Mapping[int, Stamp]) -> list[tuple[tuple[int, int, str], list[int]]]:
    """Group ranks by kind, number and name of their call, largest group first."""
    calls: dict[tuple[int, int, str], list[int]] = {}
    for rank, stamp in sorted(stamps.items()):
        calls.setdefault((stamp.kind, stamp.number, stamp.name), []).append(rank)
    return sorted(calls.items(), key=lambda pair: -len(pair[1]))


def different_calls(stamps: Mapping[int, Stamp]) -> RankMismatchError | None:
    """Build the error for ranks in different calls; None if they are in one."""
    calls = _by_call(stamps)
    if len(calls) < 2:
        return None
    told = "; ".join(
        f"{ranks_text(ranks)} in {f'{name}, call {number} there' if kind else 'a gather that is no step'}"
        for (kind, number, name), ranks in calls
    )
    only_numbers = len({(kind, name) for (kind, _, name), _ in calls}) == 1
    return RankMismatchError(
        f"ranks are in different calls of the optimizer: {told}. All ranks must make the same calls"
        f"{_SKIPPED_HERE if only_numbers else ''}"
    )


_SKIPPED_HERE = (
    ". A GradScaler's step counts even if it is skipped: one found an infinity on some ranks alone. Reduce "
    "gradients before the scaler looks at them, as DDP does, or use "
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, with the process group"
)


def different_numbers(stamps: Mapping[int, Stamp]) -> RankMismatchError | None:
    """Build the error for ranks with different numbers of calls; None if they agree."""
    calls = _by_call(stamps)
    if len(calls) < 2:
        return None
    made = "; ".join(
        f"{ranks_text(ranks)} made {number}" + (f", the last one {name}" if number else "")
        for (_, number, name), ranks in calls
    )
    return RankMismatchError(
        f"ranks have made different calls of the optimizer: {made}. All ranks must make the same"
    )
