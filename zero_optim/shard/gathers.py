"""Gathers: the owners send their rows of each bucket to all ranks, by broadcasts or equal slices.

Here one is started; `zero_optim.shard.engine` decides when. Who calls `start_gather`: the tasks of ``step()``
(`zero_optim.iteration.tasks`), of parts in the backward pass (`zero_optim.iteration.overlap`) and of units,
before a module is called or computes gradients (`zero_optim.ddp.full.unit`). Functions that take a group or
lanes communicate; all ranks call them in the same order of buckets. An owner is the root of a broadcast;
where `Transport.sends_slices`, a rank sends its slice of the bucket, which may hold rows of others.

Note [A lane an owner]
    A gloo group runs operations in order, few at a time, so several owners' broadcasts are often half duplex.
    With a lane (a group) for each owner, a 55 MB gather between two ranks takes 240 ms over 1 Gbit/s instead
    of 390 to 440 (the wire alone: 233), and 0.8 to 0.9 of the time over loopback. Below 2 MiB lanes gain
    nothing, and cost threads and file descriptors; the first larger gather of several owners creates them.
    An overlapped step has its own, as its thread gathers in another order. Other backends have one
    communicator a device: Note [Rows at once] in `zero_optim.comm.collectives`. Merged rows, gathers during
    the step and a limit of the *number* of pending gathers gained nothing.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, host_lanes_beside
from zero_optim.comm.sending import gather_heads, gather_slices, spread_rows
from zero_optim.compat.streams import is_asynchronous
from zero_optim.flow.pending import Pending, Waitable
from zero_optim.flow.schedule import Placement
from zero_optim.health.stamp import Header
from zero_optim.health.unit_stamps import Purpose, UnitStamps
from zero_optim.shard.bucket import Bucket, GatheredValues, Values

# See Note [A lane an owner].
LANES_FROM_NBYTES = 2**21


def start_gather(
    lanes: Sequence[RankGroup],
    bucket: Bucket[GatheredValues],
    header: Header | None = None,  # goes with it
    changed: Collection[Tensor] | None = None,  # parameters that change for autograd; None for all
    mark: int = 0,  # of a unit's gather, of which ranks may start different ones
) -> Pending[None]:
    """Start the gather of a bucket, owner r on lane r modulo their number. Until ``wait()`` nobody writes."""
    values, members, works = bucket.values, bucket.members, list[Waitable]()
    (flat, own), heads, label = values.fill(), None, members.label
    used = [flat] if own is None else [flat, own]
    if header is not None:
        heads = header.written(lanes[0].size, lanes[0].rank, bucket.device)
        used += heads
        if works := gather_heads(lanes, heads[0], label):
            works, heads = [Pending(works, partial(header.read, heads[0]))], None
    rows = () if members.slices is not None else values.sent or members.rows(flat)
    if members.slices is not None:
        works += gather_slices(lanes[0], flat, members.slices, label, heads, own)
    elif mark and works:
        works += [spread_rows(lanes, rows, mark, label)] if rows else []
    else:
        for number, lane in enumerate(lanes):
            some = rows if len(lanes) == 1 else [row for row in rows if row[0] % len(lanes) == number]
            works += lane.broadcast_rows(some, label, None if number else heads, mark)

    def end(_: object) -> None:
        if header is not None and heads is not None:  # in one message or launch with the rows
            header.read(heads[0])
        values.receive(flat, changed)

    return Pending(works, end, used)


def start_header(lane: RankGroup, header: Header, device: torch.device) -> Pending[None]:
    """Start the gather of a header alone; all ranks call."""
    heads = header.written(lane.size, lane.rank, device)
    works = gather_heads([lane], heads[0], "stamps") or lane.broadcast_rows([], "stamps", heads)
    return Pending(works, partial(header.read, heads[0]), heads)


class BucketGathers:
    """Starts the gathers of an optimizer's ``buckets``, which may become more, on lanes where these gain."""

    def __init__(self, ranks: RankGroup, buckets: Sequence[Bucket[Values]]) -> None:
        self.group = ranks.during("gather")
        self._ranks, self._buckets = ranks, buckets
        self._lanes: Lease | None = None  # see Note [A lane an owner]
        self._num_asked = 0  # buckets when it was asked whether they gain by them

    def __reduce__(self) -> tuple[Callable[..., "BucketGathers"], tuple[RankGroup, Sequence[Bucket[Values]]]]:
        """Copy and pickle without lanes, which are taken anew."""
        return BucketGathers, (self._ranks, self._buckets)

    def start(self, bucket: Bucket[GatheredValues], header: Header | None) -> Pending[None]:
        """Start the gather of a bucket; all ranks call. The first one may take lanes."""
        if self._lanes is None and self._num_asked != len(self._buckets):
            self._num_asked = len(self._buckets)
            if self._gain_by_lanes():
                self._lanes = host_lanes_beside(self.group)
        groups: Sequence[RankGroup] = (self.group,)
        if self._lanes is not None and self._may_use_lanes(bucket):
            groups = self._lanes.groups
        return start_gather(groups, bucket, header)

    def _gain_by_lanes(self) -> bool:
        """Whether lanes make a gather faster; the same on every rank."""
        if self.group.size == 1:
            return False
        whole = (bucket for bucket in self._buckets if bucket.schedule.parameters is Placement.WHOLE)
        sent = list(filter(self._may_use_lanes, whole))
        if sum(bucket.nbytes for bucket in sent) < LANES_FROM_NBYTES:
            return False
        return len({row.owner for bucket in sent for row in bucket.layout.rows}) > 1

    def _may_use_lanes(self, bucket: Bucket[Any]) -> bool:
        group, device = self.group, bucket.device
        return group.transport(device).lets_threads and group.shared_memory(device) is None

    def abandon(self) -> None:
        """Give up the lanes, after a failure: nobody else shall have them."""
        if self._lanes is not None:
            self._lanes.abandon()


class UnitGathers:
    """Starts the gathers of units, among all ranks of an optimizer; ``lease``: of lanes for gathers alone."""

    def __init__(self, group: RankGroup, lease: Lease, stamps: UnitStamps) -> None:
        self.group, self.stamps, self._lease = group, stamps, lease
        self._lanes = [lane.during("gather") for lane in lease.groups]

    def start(
        self, bucket: Bucket[GatheredValues], purpose: Purpose, *, tells: bool = False
    ) -> Pending[None]:
        """Start a bucket's gather, with a stamp as `UnitStamps.begin`; all ranks call, in one order."""
        self.group.works.note_failure("")  # its stamp tells
        mark, header = self.stamps.begin(bucket.params[0], purpose, tells=tells)
        if self.group.size == 1:
            return start_gather(self._lanes, bucket)
        if self.group.shared_memory(bucket.device) is None and is_asynchronous(bucket.device):
            header = header._replace(row=self.stamps.row(mark, bucket.device))
        return start_gather(self._lanes, bucket, header, mark=mark)  # Note [Marks of units] in `unit_stamps`

    def abandon(self) -> None:
        """Give up the lanes, on which ranks started different gathers."""
        self._lease.abandon()
