"""Gathers of unit buckets from the owners of their rows."""

from dataclasses import dataclass
from functools import partial

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.flow.pending import Pending
from zero_optim.health.unit_stamps import Purpose, UnitMarks, UnitStamps
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import start_gather


@dataclass(frozen=True, slots=True, eq=False)
class UnitGathers:
    """Starts the gathers of units, among all ranks of an optimizer."""

    group: RankGroup
    lanes: Lease  # for gathers alone
    marks: UnitMarks

    def start(self, bucket: Bucket, stamps: UnitStamps | None, purpose: Purpose) -> Pending:
        """Start a bucket's gather, with stamps if any; all ranks call, in one order."""
        lanes = [lane.during("gather") for lane in self.lanes.groups]
        mark = self.marks.mark_of(bucket.params[0], purpose)
        if self.group.transport(bucket.device).waits_on_host:
            send = None if stamps is None else stamps.send
            return start_gather(lanes, bucket, send, partial(self.marks.start_rows, mark))
        return start_gather(lanes, bucket, partial(self.marks.send, mark, stamps))

    def check(self) -> None:
        """Raise RankMismatchError if ranks gather different buckets: Note [Marks of units]."""
        self.marks.check()

    def abandon(self) -> None:
        """Give up the lanes, on which ranks started different gathers."""
        self.lanes.abandon()
