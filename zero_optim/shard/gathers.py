"""Gathers: the owners broadcast their rows of each bucket to all ranks.

Here one is started; `zero_optim.shard.engine` decides when. Functions that take a group or lanes
communicate; all ranks call them in the same order of buckets.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.sending import gather_heads, gather_slices, spread_rows
from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import Arrival, Header
from zero_optim.health.unit_stamps import Purpose, UnitStamps
from zero_optim.shard.bucket import Bucket


def start_gather(
    lanes: Sequence[RankGroup],
    bucket: Bucket,
    header: Header | None = None,  # goes with it
    changed: Collection[Tensor] | None = None,  # parameters that change for autograd; None for all
) -> Pending[None]:
    """Start the gather of a bucket, owner r on lane r modulo their number. Until ``wait()`` nobody writes."""
    flat, own = bucket.fill(), bucket.own_row
    heads = None if header is None else header.written(lanes[0].size, lanes[0].rank, bucket.device)
    works = [] if heads is None else gather_heads(lanes, heads[0], bucket.label)
    beside = None if works else heads  # in one message or launch with the rows
    if bucket.slices is not None:
        works += gather_slices(lanes[0], flat, bucket.slices, bucket.label, beside, own)
    else:
        rows = bucket.rows(flat)
        for number, lane in enumerate(lanes):
            some = rows if len(lanes) == 1 else [row for row in rows if row[0] % len(lanes) == number]
            works += lane.broadcast_rows(some, bucket.label, None if number else beside)

    def end(_: object) -> None:
        bucket.receive(flat, changed)
        if header is not None and heads is not None:
            header.take(Arrival(heads[0], header.mine))

    return Pending(works, end, [flat, *(() if own is None else (own,)), *(heads or ())])


def start_header(lane: RankGroup, header: Header, device: torch.device) -> Pending[None]:
    """Start the gather of a header alone; all ranks call."""
    heads = header.written(lane.size, lane.rank, device)
    works = gather_heads([lane], heads[0], "stamps") or lane.broadcast_rows([], "stamps", heads)
    return Pending(works, lambda _: header.take(Arrival(heads[0], header.mine)), heads)


@dataclass(frozen=True, slots=True, eq=False)
class UnitGathers:
    """Starts the gathers of units, among all ranks of an optimizer."""

    group: RankGroup
    lanes: Lease  # for gathers alone
    stamps: UnitStamps

    def start(self, bucket: Bucket, purpose: Purpose, *, tells: bool = False) -> Pending[None]:
        """Start a bucket's gather, with a stamp as `UnitStamps.begin`; all ranks call, in one order."""
        self.group.works.note_failure("")  # its stamp tells
        mark, header = self.stamps.begin(bucket.params[0], purpose, tells=tells)
        lanes = [lane.during("gather") for lane in self.lanes.groups]
        if self.group.size == 1:
            return start_gather(lanes, bucket)
        if not self.group.transport(bucket.device).waits_on_host:
            if self.group.shared_memory(bucket.device) is None:
                header = header._replace(row=self.stamps.row(mark, bucket.device))
            return start_gather(lanes, bucket, header)
        flat, (mine, take, _) = bucket.fill(), header
        heads, _ = header.written(self.group.size, self.group.rank, bucket.device)
        before = list(enumerate(heads.unbind()))  # Note [Marks of units] in `unit_stamps`
        first, *rest = spread_rows(lanes, before, bucket.rows(flat), mark, bucket.label)
        taken = Pending([first], lambda _: take(Arrival(heads, mine)))
        return Pending([taken, *rest], lambda _: bucket.receive(flat), [flat])

    def abandon(self) -> None:
        """Give up the lanes, on which ranks started different gathers."""
        self.lanes.abandon()
