"""Gathers of unit buckets: from their owners, or inside a replica from copies.

Note [Held by a replica]
    With state sharded over a whole mesh (Note [Whose state it is] in `zero_optim.comm.mesh`) an owner may be
    across the slow network. So a rank also holds copies of its *column*'s rows (the ranks with its number in
    other replicas), and units are gathered inside the replica. With R replicas of S ranks it holds 1/S of the
    parameters and the state of 1/(R S).

    The first gather after a change *renews* all copies: owners broadcast in their columns, and each unit's
    gather waits for its own. All ranks must renew at the same gather; as one may have left a ``step()`` out,
    every reduced backward pass causes a renewal. Copies carry their renewal's stamps, so a bucket reports the
    last call only in that pass.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.mesh import RankMesh
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending
from zero_optim.health.unit_stamps import Purpose, UnitMarks, UnitStamps
from zero_optim.plan.layout import Span
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import gather_into, start_broadcasts, start_gather
from zero_optim.shard.row_bucket import RowBucket
from zero_optim.shard.row_storage import RowStorage


class UnitGathers(Protocol):
    """Starts the gathers of units."""

    def start(self, bucket: Bucket, stamps: UnitStamps | None, purpose: Purpose) -> Pending:
        """Start a bucket's gather, with stamps if any; all ranks call, in one order."""
        ...

    def check(self) -> None:
        """Raise RankMismatchError if ranks gather different buckets: Note [Marks of units]."""
        ...

    def abandon(self) -> None:
        """Give up the lanes, on which ranks started different gathers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GathersFromOwners:
    """Gathers among all ranks from the owners."""

    group: RankGroup
    lanes: Lease  # for gathers alone
    marks: UnitMarks

    def start(self, bucket: Bucket, stamps: UnitStamps | None, purpose: Purpose) -> Pending:
        """See `UnitGathers.start`."""
        lanes = [lane.during("gather") for lane in self.lanes.groups or (self.group,)]
        mark = self.marks.mark_of(bucket.params[0], purpose)
        if self.group.transport(bucket.device).waits_on_host:
            send = None if stamps is None else stamps.send
            return start_gather(lanes, bucket, send, partial(self.marks.start_rows, mark))
        return start_gather(lanes, bucket, partial(self.marks.send, mark, stamps))

    def check(self) -> None:
        """See `UnitGathers.check`."""
        self.marks.check()

    def abandon(self) -> None:
        """See `UnitGathers.abandon`."""
        self.lanes.abandon()


class _Column:
    """This rank's copies of one bucket; ``renewed_in`` is the pass of the last renewal."""

    def __init__(self, bucket: RowBucket, mesh: RankMesh, storage: RowStorage) -> None:
        self.bucket = bucket
        self._storage = storage
        self.renewed_in = -1
        self._rank, self._places = mesh.everyone.rank, mesh.places
        number = mesh.places[self._rank][1]
        self.spans = [span for span in bucket.layout.spans() if mesh.places[span.owner][1] == number]
        self._copies: dict[Span, Tensor] = {}  # of the other ranks' rows
        self._seen: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def is_due(self, num_reduced: int) -> bool:
        """Whether to renew after this many reduced passes."""
        before, self._seen = self._seen, (self.bucket.num_changes, num_reduced)
        return before != self._seen

    def renew(self, across: Sequence[RankGroup], stamps: UnitStamps) -> Pending:
        """Start renewing the copies; all ranks of the column call."""
        rows: list[tuple[int, Tensor]] = []
        received: dict[Span, Tensor] = {}
        for span in self.spans:
            is_own = span.owner == self._rank
            row = self._own(span, stamps) if is_own else received.setdefault(span, self._place_for(span))
            rows.append((self._places[span.owner][0], row))
        works = start_broadcasts(across, rows, f"{self.bucket.label}, to the replicas")
        return Pending(works, [row for _, row in rows], partial(self._take, received))

    def _own(self, span: Span, stamps: UnitStamps) -> Tensor:
        layout = self.bucket.layout
        row = self.bucket.params[0].new_zeros(span.stop - span.start)
        if span.start < layout.end_of_rows:
            self.bucket.read_row(row)
        stamps.write(row, span.start, layout.rooms, self._rank)
        return row

    def _place_for(self, span: Span) -> Tensor:
        """Return a row's receive buffer: the copy itself, unless on the host."""
        if span in self._copies and not self._storage.on_host:
            return self._copies[span]
        return self.bucket.params[0].new_empty(span.stop - span.start)

    def _take(self, received: Mapping[Span, Tensor]) -> None:
        for span, row in received.items():
            if span in self._copies and self._storage.on_host:
                self._storage.write(self._copies[span], row)
            else:
                self._copies[span] = self._storage.new_row(row)

    def fill(self) -> Tensor:
        flat = self.bucket.fill()
        for span, copy in self._copies.items():
            self._storage.read(copy, flat[span.start : span.stop])
        return flat


class GathersInReplicas:
    """Gathers inside each replica of a mesh: Note [Held by a replica]. All ranks of the mesh construct it.

    Lanes ``inner`` (replica) and ``across`` (column) serve these gathers alone. ``num_reduced`` counts
    reduced backward passes, which may change ``trained``.
    """

    def __init__(
        self,
        mesh: RankMesh,
        inner: Lease,
        across: Lease,
        units: Mapping[RowBucket, str],
        stamps: UnitStamps,
        trained: Collection[Tensor],
        num_reduced: Callable[[], int],
        storage: RowStorage,
    ) -> None:
        labels = {bucket.params[0]: name for bucket, name in units.items()}
        self._marks, marks = UnitMarks(labels, mesh.inner), UnitMarks(labels, mesh.everyone)
        self._from_owners = GathersFromOwners(mesh.everyone, Lease.of(mesh.everyone), marks)
        self._mesh = mesh
        self._inner = inner
        self._across = across
        self._columns = {bucket: _Column(bucket, mesh, storage) for bucket in units}
        self._renewals = Flow(2 if storage.on_host else math.inf)
        self._stamps = stamps
        self._trained = {bucket for bucket in units if not set(bucket.params).isdisjoint(trained)}
        self._num_reduced = num_reduced

    @property
    def nbytes_held(self) -> int:
        """Bytes of the copies of other ranks' rows."""
        return sum(column.nbytes for column in self._columns.values())

    def check(self) -> None:
        """See `UnitGathers.check`."""
        self._marks.check_known()

    def abandon(self) -> None:
        """See `UnitGathers.abandon`."""
        self._inner.abandon()

    def start(self, bucket: Bucket, stamps: UnitStamps | None, purpose: Purpose) -> Pending:
        """See `UnitGathers.start`; buckets outside units come from their owners."""
        column = self._columns.get(bucket) if isinstance(bucket, RowBucket) else None
        if column is None:
            return self._from_owners.start(bucket, None, purpose)
        self._renew()
        self._renewals.wait_for([column])
        flat, rank = column.fill(), self._mesh.everyone.rank
        tells = stamps is not None and column.renewed_in == stamps.num_passes
        take = stamps.send(bucket.headers(flat), rank) if stamps is not None and tells else None
        places = self._mesh.places
        rows = [(places[span.owner][1], flat[span.start : span.stop]) for span in bucket.layout.spans()]
        start_rows = None
        if self._mesh.inner.transport(bucket.device).waits_on_host:
            start_rows = partial(self._marks.start_rows, self._marks.mark_of(bucket.params[0], purpose))
        return gather_into(flat, bucket, self._lanes(self._inner), rows, take, start_rows=start_rows)

    def _renew(self) -> None:
        num_reduced = self._num_reduced()
        for bucket, column in self._columns.items():
            if not column.is_due(num_reduced if bucket in self._trained else 0):
                continue
            column.renewed_in = self._stamps.num_passes
            if column.spans:
                self._renewals.wait_for([column])
                begin = partial(column.renew, self._lanes(self._across), self._stamps)
                self._renewals.start(begin, keys=[column])

    def _lanes(self, lease: Lease) -> list[RankGroup]:
        return [lane.during("gather") for lane in lease.groups]
