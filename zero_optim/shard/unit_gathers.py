"""How the buckets of units are gathered: from their owners, or inside a replica from what it holds.

Note [Held by a replica]
    With state over all ranks of a mesh (Note [Whose state it is] in `zero_optim.comm.mesh`) a parameter's
    owner may be in another replica, across the slow network. So each rank keeps its own row, and copies of
    the rows of its *column*, the ranks with its number in the other replicas; units are gathered from these
    inside the replica. With R replicas of S ranks a rank holds 1/S of the parameters, and the state of
    1/(R S).

    Steps, loads and writes change rows on their owners alone. The first gather behind that *renews* the
    copies: each owner broadcasts its rows in its column, for all units at once, and each renewal is waited
    for when its unit is gathered. All ranks must begin it at the same gather. They all see loads, writes and
    calls of ``step()``; one that left a step out would not renew, so what a reduced backward pass may have
    led to is renewed too. Copies have the stamps of their owners as they were when they were sent: so a
    bucket tells of the last call only in the pass in which it was renewed.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.started import Pending
from zero_optim.health.unit_marks import Marked, Purpose, UnitMarks
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.layout import Layout, Span
from zero_optim.shard.gathers import gather_into, start_broadcasts, start_gather
from zero_optim.shard.keeping import RowKeeping
from zero_optim.shard.storage import ParamBucket
from zero_optim.shard.units import UnitBucket


class UnitGathers(Protocol):
    """Starts the gathers of units."""

    def start(
        self,
        bucket: ParamBucket,
        stamps: UnitStamps | None = None,
        purpose: Purpose = Purpose.REQUEST,
    ) -> Pending:
        """Start the gather of a bucket, with stamps if there are any; all ranks call, in one order."""
        ...

    def check(self) -> None:
        """Raise RankMismatchError if ranks gather different things: Note [Marks of units] in `unit_marks`."""
        ...

    def abandon(self) -> None:
        """Let nobody use the lanes any more: ranks have started different gathers on them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GathersFromOwners:
    """Gathers among all ranks, each of which sends what it owns."""

    group: RankGroup
    lanes: Lease  # for gathers alone
    marks: UnitMarks

    def start(
        self,
        bucket: ParamBucket,
        stamps: UnitStamps | None = None,
        purpose: Purpose = Purpose.REQUEST,
    ) -> Pending:
        """See `UnitGathers.start`."""
        lanes = [lane.during("gather") for lane in self.lanes.groups or (self.group,)]
        mark = self.marks.mark_of(bucket, purpose)
        if self.group.is_gloo_on_cpu(bucket.device):
            return start_gather(lanes, bucket, stamps, partial(self.marks.start_rows, mark))
        return start_gather(lanes, bucket, Marked(self.marks, mark, stamps))

    def check(self) -> None:
        """See `UnitGathers.check`."""
        self.marks.check()

    def abandon(self) -> None:
        """See `UnitGathers.abandon`."""
        self.lanes.abandon()


class _Column:
    """What this rank holds of one bucket for its replica; `renewed_in`: the pass of its last renewal."""

    def __init__(self, bucket: UnitBucket, mesh: RankMesh, keeping: RowKeeping | None) -> None:
        self.bucket = bucket
        self._keeping = keeping
        self.renewed_in = -1
        self._rank = mesh.everyone.rank
        number = mesh.places[self._rank][1]
        self._spans = [span for span in _spans(bucket.layout) if mesh.places[span.owner][1] == number]
        self._copies: dict[Span, Tensor] = {}  # of the other ranks' rows
        self._coming: Pending | None = None
        self._seen: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def is_due(self, num_reduced: int) -> bool:
        """Whether rows may have changed since they were renewed; see `renew`."""
        return self._seen != (self.bucket.num_changes, num_reduced)

    def renew(
        self, across: Sequence[RankGroup], mesh: RankMesh, num_reduced: int, stamps: UnitStamps
    ) -> None:
        """Start to renew the copies on lanes of the column, whose ranks all call.

        So many backward passes were reduced (`num_reduced`) that may have led to a change.
        """
        self.arrive()
        self._seen = (self.bucket.num_changes, num_reduced)
        self.renewed_in = stamps.num_passes
        rows: list[tuple[int, Tensor]] = []
        received: dict[Span, Tensor] = {}
        for span in self._spans:
            is_own = span.owner == self._rank
            row = self._own(span, stamps) if is_own else received.setdefault(span, self._place_for(span))
            rows.append((mesh.places[span.owner][0], row))
        if rows:
            works = start_broadcasts(across, rows, f"{self.bucket.label}, to the replicas")
            self._coming = Pending(works, [row for _, row in rows], partial(self._take, received))

    def _own(self, span: Span, stamps: UnitStamps) -> Tensor:
        """Copy what this rank sends, with its stamp."""
        layout = self.bucket.layout
        is_behind = span.start >= layout.end_of_rows
        like = self.bucket.params[0]
        row = like.new_zeros(span.stop - span.start) if is_behind else self.bucket.row_as_sent()
        stamps.write(row, span.start, layout.rooms, self._rank)
        return row

    def _place_for(self, span: Span) -> Tensor:
        """Give the memory in which to receive a row: the copy itself, unless that is in a file."""
        if self._keeping is None and span in self._copies:
            return self._copies[span]
        return self.bucket.params[0].new_empty(span.stop - span.start)

    def _take(self, received: Mapping[Span, Tensor]) -> None:
        """Have copies of rows that have come where they are kept."""
        for span, row in received.items():
            if self._keeping is None:
                self._copies[span] = row
            elif span in self._copies:
                self._keeping.write(self._copies[span], row)
            else:
                self._copies[span] = self._keeping.new_row(row)

    def nbytes_to_keep(self) -> list[int]:
        """List the bytes of each copy that there will be."""
        size = self.bucket.params[0].element_size()
        return [(span.stop - span.start) * size for span in self._spans if span.owner != self._rank]

    def arrive(self) -> None:
        """Wait, with the current stream, for the last renewal, unless it is known to be over."""
        if self._coming is not None and self._coming.wait():
            self._coming = None

    def fill(self) -> Tensor:
        """Make the flat tensor, with what the column has of it."""
        self.arrive()
        flat = self.bucket.fill()
        for span, copy in self._copies.items():
            place = flat[span.start : span.stop]
            if self._keeping is None:
                place.copy_(copy)
            else:
                self._keeping.read(copy, place)
        return flat


class GathersInReplicas:
    """Gathers inside each replica of a mesh: Note [Held by a replica]. All ranks of the mesh construct it.

    Args:
        mesh: the ranks.
        inner: lanes of this replica, for these gathers alone.
        across: lanes of this rank's column, likewise.
        units: the name and the buckets of each, by number.
        stamps: of this rank.
        trained: parameters that backward passes may lead to a change of.
        num_reduced: gives how many backward passes were reduced.
        keeping: keeps the copies of other ranks' rows, on all ranks or none; OSError if the disk is full.
    """

    def __init__(
        self,
        mesh: RankMesh,
        inner: Lease,
        across: Lease,
        units: Sequence[tuple[str, Sequence[UnitBucket]]],
        stamps: UnitStamps,
        trained: Collection[Tensor],
        num_reduced: Callable[[], int],
        keeping: RowKeeping | None = None,
    ) -> None:
        buckets = [bucket for _, of_unit in units for bucket in of_unit]
        self._marks = UnitMarks(units, mesh.inner)
        self._of_everyone = UnitMarks(units, mesh.everyone)  # what is gathered from owners
        self._mesh = mesh
        self._inner = inner
        self._across = across
        self._columns = {bucket: _Column(bucket, mesh, keeping) for bucket in buckets}
        self._most_under_way = len(self._columns) if keeping is None else 2
        self._stamps = stamps
        self._trained = {bucket for bucket in buckets if not set(bucket.params).isdisjoint(trained)}
        self._num_reduced = num_reduced
        if keeping is not None:
            with failing_together(mesh.everyone):
                keeping.reserve_rows(
                    nbytes for each in self._columns.values() for nbytes in each.nbytes_to_keep()
                )

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

    def start(
        self,
        bucket: ParamBucket,
        stamps: UnitStamps | None = None,
        purpose: Purpose = Purpose.REQUEST,
    ) -> Pending:
        """See `UnitGathers.start`. What is no bucket of a unit comes from its owners."""
        column = self._columns.get(bucket) if isinstance(bucket, UnitBucket) else None
        if column is None:
            return GathersFromOwners(
                self._mesh.everyone, Lease.of(self._mesh.everyone), self._of_everyone
            ).start(bucket, None, purpose)
        self._renew()
        flat, rank = column.fill(), self._mesh.everyone.rank
        tells = stamps is not None and column.renewed_in == stamps.num_passes
        take = stamps.send(flat, bucket.layout, rank) if stamps is not None and tells else None
        rows = [
            (self._mesh.places[span.owner][1], flat[span.start : span.stop]) for span in _spans(bucket.layout)
        ]
        start_rows = None
        if self._mesh.inner.is_gloo_on_cpu(bucket.device):
            start_rows = partial(self._marks.start_rows, self._marks.mark_of(bucket, purpose))
        return gather_into(flat, bucket, self._lanes(self._inner), rows, take, start_rows=start_rows)

    def _renew(self) -> None:
        """Start to renew all that may have changed; each is waited for by itself."""
        num_reduced, under_way = self._num_reduced(), deque[_Column]()
        for bucket, column in self._columns.items():
            number = num_reduced if bucket in self._trained else 0
            if not column.is_due(number):
                continue
            if len(under_way) == self._most_under_way:
                under_way.popleft().arrive()
            column.renew(self._lanes(self._across), self._mesh, number, self._stamps)
            under_way.append(column)

    def _lanes(self, lease: Lease) -> list[RankGroup]:
        return [lane.during("gather") for lane in lease.groups]


def _spans(layout: Layout) -> list[Span]:
    """List what owners send of a bucket; the same on every rank."""
    rows = [Span(row.owner, row.start, row.stop) for row in layout.rows if row.stop > row.start]
    return rows + [Span(room.owner, room.start, room.stop) for room in layout.rooms_behind]
