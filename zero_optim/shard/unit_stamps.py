"""Stamps in the gathers of units, so that ranks of a fully sharded model fail together and by name.

Note [Stamps of units]
    A step gathers nothing there. So the gathers of the forward passes after it carry its stamp. They are
    collectives that all ranks make in one order, between the same calls of modules. So what came with them
    since the pass began is the same on every rank, at each point of the pass, and all ranks may raise there
    and communicate about it. That goes for a rank that failed too: it raises once more, since the others do
    not go on to the next unit. A rank is heard with the first unit of which it has a row.

    Each forward pass tells of the last call, however many passes there are. So a rank that has left out a
    step, or taken two, is found in the next pass: its call has another number. In other gathers that cannot
    be, see Note [What a count cannot tell] in `stamps`.

    On the CPU the stamps of a unit are looked at when it has come. On an accelerator the CPU would wait for
    the device, so it looks when the next forward pass begins; in training a backward pass lies between, so
    that hardly waits. Passes without gradients, which follow each other closely, tell nothing there. Nor do
    backward passes: the forward pass before has, and an error in the middle of them would leave reductions
    half done.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.plan.layout import Layout, Room
from zero_optim.plan.options import Plain
from zero_optim.shard.stamp import MARK, MARK_NBYTES, STAMP_NBYTES, stamps_in
from zero_optim.shard.stamps import Origins, Stamps


class UnitStamps:
    """Writes and reads the stamps of one optimizer's last call in gathers of units.

    Args:
        stamps_of: gives those of the optimizer, for its present plan; None in a group of one.
        group: the ranks.
        origins: see `zero_optim.shard.stamps.Call`.
        told: called with what this rank is about to raise, as the others of the group do.

    Attributes:
        num_passes: how many have begun.
    """

    def __init__(
        self,
        stamps_of: Callable[[], Stamps | None],
        group: RankGroup,
        origins: Callable[[Sequence[Mapping[str, Plain]]], Origins],
        told: Callable[[Exception], None],
    ) -> None:
        self._stamps_of = stamps_of
        self._group = group
        self._origins = origins
        self._told = told
        self.num_passes = 0
        self._came: list[tuple[Sequence[Room], HostCopy]] = []
        self._seen: dict[int, bytes] = {}  # in this pass, by rank; the last one of each

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """Write this rank's stamp, as `Stamps.send` does; the CPU waits for nothing."""
        rooms, stamps = layout.rooms, self._stamps_of()
        may_wait = torch.is_grad_enabled() or not is_asynchronous(flat.device)
        if not rooms or stamps is None or not may_wait:
            return _nothing
        places = stamps.write(flat, rooms, rank)

        def take() -> None:
            self._came.append((rooms, HostCopy(torch.cat(places))))

        return take

    def write(self, span: Tensor, start: int, rooms: Sequence[Room], rank: int) -> None:
        """Write this rank's stamp into what it sends of a flat tensor, if one of some rooms is there.

        Args:
            span: what is sent.
            start: where it begins in the flat tensor.
            rooms: of the layout.
            rank: this group rank.
        """
        stamps, stop = self._stamps_of(), start + span.numel()
        here = [room for room in rooms if room.owner == rank and start <= room.start < stop]
        if stamps is not None and here:
            moved = [room._replace(start=room.start - start, stop=room.stop - start) for room in here]
            stamps.write(span, moved, rank)

    def begin_pass(self) -> None:
        """Begin a pass: forget the one before, and look at what was not looked at there; all ranks call.

        Raises:
            Exception: as `look`.
        """
        self.num_passes += 1
        try:
            self._read()
        finally:
            self._seen.clear()

    def look(self) -> None:
        """Look at what has come, unless the CPU would wait for it; all ranks call, with the same gathers.

        Communicates if ranks differ.

        Raises:
            RankMismatchError: on every rank: they have made different calls, or their options differ.
            Exception: on every rank: the last call failed on one. A rank says the same only once.
        """
        if all(copy.is_here for _, copy in self._came):
            self._read()

    def _read(self) -> None:
        came, self._came = self._came, []
        for rooms, copy in came:
            octets = tensor_to_bytes(self._group.read(copy))
            for number, room in enumerate(rooms):
                self._seen[room.owner] = _unmarked(octets[number * STAMP_NBYTES :][:STAMP_NBYTES])
        known = self._stamps_of()
        if known is None or not came or _are_one(self._seen):
            return
        stamps = dict(zip(self._seen, stamps_in(b"".join(self._seen.values())), strict=True))
        error = known.difference(self._group.during("agree"), stamps, self._origins)
        if error is not None:
            self._told(error)
            raise error


def _unmarked(octets: bytes) -> bytes:
    """Leave out what tells one gather from another."""
    return octets[:MARK] + bytes(MARK_NBYTES) + octets[MARK + MARK_NBYTES :]


def _are_one(seen: Mapping[int, bytes]) -> bool:
    """Whether all ranks have the same stamp, of a call that went well."""
    distinct = set(seen.values())
    return not distinct or (len(distinct) == 1 and not _has_failed(distinct.pop()))


def _has_failed(octets: bytes) -> bool:
    return next(stamps_in(octets)).has_failed


def _nothing() -> None:
    """Take nothing: there are no stamps."""
