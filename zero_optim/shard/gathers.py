"""Gathers: the owners broadcast their rows of each bucket to all ranks.

A plain ``step()`` comes here by `Calls.make` and `Sharding.gather`, after the local step, also if that
raised. Functions that take a group or lanes communicate; all ranks call them in the same order of buckets.

Note [A lane an owner]
    A gloo group runs operations in order, few at a time, so several owners' broadcasts are often half duplex.
    With a lane (a group) for each owner, a 55 MB gather between two ranks takes 240 ms over 1 Gbit/s instead
    of 390 to 440 (the wire alone: 233), and 0.8 to 0.9 of the time over loopback. Below 2 MiB lanes gain
    nothing, and cost threads and file descriptors; the first larger gather of several owners creates them.
    An overlapped step has its own, as its thread gathers in another order. Other backends have one
    communicator a device: Note [Rows at once] in `zero_optim.comm.collectives`. Merged rows, gathers during
    the step and a limit of the *number* of pending gathers gained nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, host_lanes_beside
from zero_optim.comm.sending import spread_rows
from zero_optim.comm.traffic import Waitable
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending, Then
from zero_optim.flow.schedule import LAZY, Moment, Operation, Schedule
from zero_optim.health.stamp import STAMP_NBYTES, Send
from zero_optim.health.stamps import Stamps
from zero_optim.health.unit_stamps import Purpose, UnitStamps
from zero_optim.shard.bucket import Bucket

# The flat tensors of pending gathers take at most the memory of this many largest buckets.
NUM_FLAT_TENSORS = 4
# See Note [A lane an owner].
LANES_FROM_NBYTES = 2**21


def start_gather(
    lanes: Sequence[RankGroup],
    bucket: Bucket,
    send: Send | None = None,  # writes a stamp
    changed: Collection[Tensor] | None = None,  # parameters that change for autograd; None for all
) -> Pending:
    """Start the gather of a bucket, owner r on lane r modulo their number. Until ``wait()`` nobody writes."""
    flat = bucket.fill()
    take = None if send is None else send(bucket.headers(flat), lanes[0].rank)
    works = start_broadcasts(lanes, bucket.rows(flat), bucket.label)

    def end() -> None:
        bucket.receive(flat, changed)
        if take is not None:
            take()

    return Pending(works, [flat], end)


def start_broadcasts(
    lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
) -> list[Waitable]:
    """Broadcast each (rank, row) on the lane of that rank."""
    if len(lanes) == 1:
        return lanes[0].broadcast_rows(rows, label)
    works: list[Waitable] = []
    for number, lane in enumerate(lanes):
        works += lane.broadcast_rows([row for row in rows if row[0] % len(lanes) == number], label)
    return works


class Gathers:
    """One optimizer's gathers and their stamps (None in a group of one)."""

    def __init__(self, stamps: Stamps | None = None) -> None:
        self.under_way = Flow()  # what a step left, as modules wait for it
        self.stamps = stamps
        self.readers: list[frozenset[Tensor]] = []  # parameters of models whose modules wait for gathers
        self._lanes: Lease | None = None  # for owners, see Note [A lane an owner]; the same on every rank

    def __reduce__(self) -> "tuple[type[Gathers], tuple[Stamps | None]]":
        """Copy and pickle as new: modules wait for the original's gathers; a copy needs its own lanes."""
        return Gathers, (self.stamps,)

    def let_go(self, *, waits: bool) -> None:
        """Wait for pending gathers or abandon them, then release the lanes; no error if a rank died."""
        lanes, self._lanes = self._lanes, None
        try:
            if waits:
                self.under_way.wait()
        except RuntimeError:  # of the backend
            if lanes is not None:
                lanes.abandon()
        finally:
            self.under_way.abandon()

    def check_failures(self) -> None:
        """Raise if a rank is known to have failed in the last call."""
        if self.stamps is not None:
            self.stamps.check_failures()

    def schedules_of(self, buckets: Sequence[Bucket]) -> list[Schedule]:
        """Return the recipe of each bucket: `LAZY` if modules wait for all of its parameters."""
        if not self.readers:
            return [bucket.schedule for bucket in buckets]
        read = frozenset[Tensor]().union(*self.readers)
        return [LAZY if read.issuperset(bucket.params) else bucket.schedule for bucket in buckets]

    def gather(self, group: RankGroup, buckets: Sequence[Bucket], *, in_step: bool) -> None:
        """Gather buckets, as many at once as memory allows; ``in_step`` sends stamps, follows schedules."""
        send = self.stamps.send if in_step and self.stamps is not None else None
        awaited = Flow(NUM_FLAT_TENSORS * max((bucket.nbytes_to_gather for bucket in buckets), default=0))
        if self._lanes is None and _gains_by_lanes(group, buckets):
            self._lanes = host_lanes_beside(group)
        lanes = self._lanes
        try:
            for bucket, schedule in zip(buckets, self.schedules_of(buckets), strict=True):
                used = (group,) if lanes is None or not _may_use_lanes(bucket, group) else lanes.groups
                begin = partial(start_gather, used, bucket, send)
                if in_step and Operation.WAIT not in schedule[Moment.STEP]:
                    self.under_way.start(begin, keys=bucket.params)
                else:
                    awaited.start(begin, bucket.nbytes_to_gather)
            awaited.wait()
        except BaseException:
            if lanes is not None:
                lanes.abandon()  # nobody else may use them
            raise


def _gains_by_lanes(group: RankGroup, buckets: Sequence[Bucket]) -> bool:
    """Whether lanes make a gather faster; the same on every rank."""
    if group.size == 1:
        return False
    sent = [bucket for bucket in buckets if _may_use_lanes(bucket, group)]
    if sum(bucket.nbytes for bucket in sent) < LANES_FROM_NBYTES:
        return False
    return len({row.owner for bucket in sent for row in bucket.layout.rows}) > 1


def _may_use_lanes(bucket: Bucket, group: RankGroup) -> bool:
    return group.transport(bucket.device).lets_threads and group.shared_memory(bucket.device) is None


@dataclass(frozen=True, slots=True, eq=False)
class UnitGathers:
    """Starts the gathers of units, among all ranks of an optimizer."""

    group: RankGroup
    lanes: Lease  # for gathers alone
    stamps: UnitStamps

    def start(self, bucket: Bucket, purpose: Purpose, *, tells: bool = False) -> Pending:
        """Start a bucket's gather, with a stamp as `UnitStamps.begin`; all ranks call, in one order."""
        mark, send = self.stamps.begin(bucket.params[0], purpose, tells=tells)
        lanes = [lane.during("gather") for lane in self.lanes.groups]
        if self.group.size == 1 or not self.group.transport(bucket.device).waits_on_host:
            return start_gather(lanes, bucket, send)
        flat = bucket.fill()
        stamps = torch.zeros(self.group.size, STAMP_NBYTES, dtype=torch.uint8, device="cpu")
        before = list(enumerate(stamps.unbind()))  # Note [Marks of units] in `unit_stamps`
        take = send(before, self.group.rank)
        first, *rest = spread_rows(lanes, before, bucket.rows(flat), mark, bucket.label)
        return Pending([Then([first], lambda _: take()), *rest], [flat], partial(bucket.receive, flat))

    def abandon(self) -> None:
        """Give up the lanes, on which ranks started different gathers."""
        self.lanes.abandon()
