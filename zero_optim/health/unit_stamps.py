"""Stamps in the gathers of units, so that ranks of a fully sharded model fail together.

Note [Stamps of units]
    Such a step gathers nothing, so the gathers of later forward passes carry its stamp. All ranks make them
    in one order: what arrived since the pass began is equal on every rank, so all may raise and communicate;
    the failed rank raises again. Each forward pass tells of the last call, so a step too few or too many
    shows.

    The CPU reads a unit's stamps when it has arrived; on an accelerator the next forward pass reads them.
    Passes without gradients tell nothing there. Nor do backward passes: an error would leave reductions half
    done.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.health.stamp import Stamp, stamps_in
from zero_optim.health.stamps import Origins, Stamps, nothing
from zero_optim.plan.layout import Layout, Span
from zero_optim.plan.option_values import Plain


class UnitStamps:
    """Writes and reads the stamps of one optimizer's last call in gathers of units.

    ``stamps_of`` returns the optimizer's stamps for its present plan; None in a group of one. ``told`` is
    called with what all ranks of the group are about to raise.
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
        self._came: list[tuple[Sequence[Span], HostCopy]] = []
        self._seen: dict[int, Stamp] = {}  # in this pass, by rank; the last one of each

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """Write this rank's stamp, as `Stamps.send`; no wait."""
        rooms, stamps = layout.rooms, self._stamps_of()
        may_wait = torch.is_grad_enabled() or not is_asynchronous(flat.device)
        if not rooms or stamps is None or not may_wait:
            return nothing
        places = stamps.write(flat, rooms, rank)
        return lambda: self._came.append((rooms, HostCopy(torch.cat(places))))

    def write(self, span: Tensor, start: int, rooms: Sequence[Span], rank: int) -> None:
        """Write this rank's stamp into a flat tensor's part from ``start``, if its space is there."""
        stamps, stop = self._stamps_of(), start + span.numel()
        here = [room for room in rooms if room.owner == rank and start <= room.start < stop]
        if stamps is not None and here:
            moved = [room._replace(start=room.start - start, stop=room.stop - start) for room in here]
            stamps.write(span, moved, rank)

    def begin_pass(self) -> None:
        """Begin a pass: compare and forget the rest of the last one; raises as `look`."""
        self.num_passes += 1
        try:
            self._read()
        finally:
            self._seen.clear()

    def look(self) -> None:
        """Compare what arrived, unless the CPU would wait; all ranks call, with the same gathers.

        Communicates, and raises on every rank, once, if calls or options differ or a rank failed.
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
