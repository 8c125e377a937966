"""Stamps in the gathers of units, so that ranks of a fully sharded model fail together and by name.

Note [Stamps of units]
    A step gathers nothing there, so the gathers of the forward passes after it carry its stamp. All ranks
    make them in one order, so what came since the pass began is the same on every rank, and all may raise
    there and communicate; the rank that failed raises once more. Each forward pass tells of the last call, so
    a step left out or taken twice shows.

    On the CPU the stamps of a unit are looked at when it has come; on an accelerator when the next forward
    pass begins. There passes without gradients tell nothing. Nor do backward passes: an error in the middle
    of them would leave reductions half done.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.health.stamp import Stamp, stamps_in
from zero_optim.health.stamps import Origins, Stamps, nothing
from zero_optim.plan.layout import Layout, Room
from zero_optim.plan.options import Plain


class UnitStamps:
    """Writes and reads the stamps of one optimizer's last call in gathers of units.

    Args:
        stamps_of: returns those of the optimizer, for its present plan; None in a group of one.
        group: the ranks.
        origins: see `zero_optim.health.stamps.Call`.
        told: called with what this rank is about to raise, as the others of the group do.
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
        self._seen: dict[int, Stamp] = {}  # in this pass, by rank; the last one of each

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """Write this rank's stamp, as `Stamps.send` does; the CPU waits for nothing."""
        rooms, stamps = layout.rooms, self._stamps_of()
        may_wait = torch.is_grad_enabled() or not is_asynchronous(flat.device)
        if not rooms or stamps is None or not may_wait:
            return nothing
        places = stamps.write(flat, rooms, rank)
        return lambda: self._came.append((rooms, HostCopy(torch.cat(places))))

    def write(self, span: Tensor, start: int, rooms: Sequence[Room], rank: int) -> None:
        """Write this rank's stamp into a part of a flat tensor, from ``start``, if its room is there."""
        stamps, stop = self._stamps_of(), start + span.numel()
        here = [room for room in rooms if room.owner == rank and start <= room.start < stop]
        if stamps is not None and here:
            moved = [room._replace(start=room.start - start, stop=room.stop - start) for room in here]
            stamps.write(span, moved, rank)

    def begin_pass(self) -> None:
        """Begin a pass: look at what was not looked at in the one before, raise as `look`, and forget it."""
        self.num_passes += 1
        try:
            self._read()
        finally:
            self._seen.clear()

    def look(self) -> None:
        """Look at what has come, unless the CPU would wait; all ranks call, with the same gathers.

        Communicates, and raises on every rank, if their calls or options differ, or one failed; only once.
        """
        if all(copy.is_here for _, copy in self._came):
            self._read()

    def _read(self) -> None:
        came, self._came = self._came, []
        for rooms, copy in came:
            stamps = stamps_in(tensor_to_bytes(self._group.read(copy)))
            for room, stamp in zip(rooms, stamps, strict=True):
                self._seen[room.owner] = stamp._replace(mark=0)
        known, distinct = self._stamps_of(), set(self._seen.values())
        is_well = len(distinct) < 2 and not any(stamp.has_failed for stamp in distinct)
        if known is None or not came or is_well:
            return
        error = known.difference(self._group.during("agree"), self._seen, self._origins)
        if error is not None:
            self._told(error)
            raise error
