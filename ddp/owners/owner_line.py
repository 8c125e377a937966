"""Buckets on their way to the owners of their gradients, one after the other.

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) gradients are added up in the order of ranks inside a replica, by the
    owner; then its row over the owners of the same rows in all replicas, by the backend, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in one order, that of the buckets, as
    NCCL wants it.

Note [Sums inside, then across]
    With state over all ranks of a mesh each rank owns a row. Inside a replica of S ranks, rank s receives the
    rows of its column, the ranks with its number in all R replicas, and adds up in the order of ranks. Then
    the column exchanges these sums, and each adds up its own row in the order of replicas. That sends (R - 1)
    / (R S) of the gradients' bytes across, half of what an all-reduce takes; on two replicas it has the same
    bits. Until then sums of the column's other rows are held, 1/S of the bucket.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowSum
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.reduction import Reduction, SumReduction
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Then

if TYPE_CHECKING:
    from zero_optim.comm.traffic import Waitable
    from zero_optim.ddp.owners.owner_rows import OwnerRows

_NUM_UNDER_WAY = 2  # portions: while one is added, the next one is on its way


@dataclass(frozen=True, slots=True, eq=False)
class SumRoute:
    """How the rows of buckets get to their owners: inside a replica, then perhaps across replicas."""

    inner: RankGroup  # the ranks of this replica
    lanes: Lease  # for exchanges among them
    across: RankGroup | None = None  # owners of the same rows in all replicas, or this rank's column
    lanes_across: Lease | None = None  # for exchanges among these: Note [Sums inside, then across]
    places: Sequence[tuple[int, int]] = ()  # of each rank of the mesh, the replica and its number there

    def start(self, rows: Sequence[Tensor], label: str) -> list[RowSum]:
        """Start the sums of a portion inside the replica, in place in the rows of this rank or column."""
        if self.lanes_across is None:
            of_replicas = [rows]
        else:
            assert self.across is not None  # they are those ranks' lanes
            by_place = dict(zip(self.places, rows, strict=True))
            numbers = range(self.inner.size)
            of_replicas = [[by_place[replica, n] for n in numbers] for replica in range(self.across.size)]
        return [
            RowSum(self.inner, self.lanes.groups, each, in_place=True, about=label) for each in of_replicas
        ]

    def start_across(self, totals: Sequence[Tensor], label: str) -> "Waitable":
        """Start the sum across replicas of what `start` has summed, in place."""
        assert self.across is not None  # asked for by the caller
        label = f"{label}, across replicas"
        if self.lanes_across is None:
            return self.across.start_sum(totals[0], label)[1]
        return RowSum(self.across, self.lanes_across.groups, totals, in_place=True, about=label)

    def abandon(self) -> None:
        """Let nobody else have the lanes, because something failed on them."""
        for lanes in (self.lanes, self.lanes_across):
            if lanes is not None:
                lanes.abandon()


class OwnerSum:
    """A bucket on its way to its owners, in portions; a part of an `OwnerLine`."""

    def __init__(self, bucket: OwnerBucket, label: str, line: "OwnerLine") -> None:
        self.count = bucket.num_portions
        self.num_started = self.num_summed = 0  # portions
        self.word: Tensor | None = None  # of a failure; one element, or none. Once the bucket has the sum
        self._bucket = bucket
        self._label = label
        self._line = line
        self._rows: OwnerRows | None = bucket.pop_rows()

    def start_next(self) -> Then:
        """Start the next portion."""
        assert self._rows is not None  # until all were summed
        rows = self._rows.pop(self.num_started, word=self._bucket.word)
        self.num_started += 1
        label = self._label
        if self.count > 1:
            label = f"{label}, portion {self.num_started} of {self.count}"
        return Then(self._line.route.start(rows, label), partial(self._summed, label))

    def _summed(self, label: str, totals: list[Tensor]) -> None:
        """Start the sum of a portion, or of all of them, across replicas; without any the bucket has it."""
        self.num_summed += 1
        route, across = self._line.route, self._line.across
        is_whole = self.num_summed == self.count
        own = None if self._rows is None else self._rows.own
        assert own is not None  # nobody else reads the own row: it alone stays, with the sum
        if is_whole:
            self._rows = None
        take = partial(self._take_over, own) if is_whole else _nothing
        if route.lanes_across is not None:
            across.start(lambda: Then([route.start_across(totals, label)], take), 1 / self.count)
        elif is_whole and route.across is not None and own.numel():  # the others have as many
            across.start(lambda: Then([route.start_across([own], self._label)], take))
        elif is_whole:
            take([])

    def _take_over(self, own: Tensor, _: object) -> None:
        self.word = self._bucket.take_over(own)

    def wait(self) -> Tensor:
        """Wait for the sum, which the bucket takes over; returns the word of a failure each time."""
        return self._line.finish(self)


def _nothing(_: object) -> None:
    pass


class OwnerLine:
    """The buckets of one pass, one after the other: the first portion of one while the last of another ends.

    So the network has work while sums are made; see Note [Memory of sharded gradients] in `owner_bucket`.
    Unless lanes are apart, on process groups of their own, a bucket is launched when the one before is
    summed.
    """

    def __init__(
        self, route: SumRoute, labels: Sequence[str], everyone: RankGroup, *, is_apart: bool = True
    ) -> None:
        self.route = route
        self.across = Flow(1)  # buckets
        self._labels = labels
        self._everyone = everyone
        self._is_apart = is_apart
        self._portions = Flow(_NUM_UNDER_WAY)
        self._last: OwnerSum | None = None
        self._before: OwnerSum | None = None  # the one before: its last portion is pending

    def keep_pace(self, fraction: float) -> None:
        """Bring what is pending as far as the bucket that fills is, from 0 to 1, but for the last portion."""
        self._end()
        last = self._last
        if last is not None:
            self._advance(last, min(int(fraction * last.count), last.count - 1))

    def launch(self, bucket: ReducerBucket, number: int, is_last: bool) -> Reduction:
        """Start a bucket; see `Launch`."""
        assert isinstance(bucket, OwnerBucket)  # see `assign_to_owners`
        self._end()
        before, self._before = self._last, self._last
        if before is not None:
            self._advance(before, before.count - (self._is_apart and not bucket.is_sparse))
        label = self._labels[number]
        if bucket.is_sparse:
            self._last = None
            return SumReduction(self._everyone, bucket, label)
        self._last = OwnerSum(bucket, label, self)
        self._fill()
        return self._last

    def finish(self, one: OwnerSum) -> Tensor:
        """Wait for a bucket, and for those before; returns its word of a failure."""
        self._advance(one, one.count)
        while one.word is None:
            with self._abandoning():
                self.across.finish_first()
        return one.word

    def _end(self) -> None:
        """Wait for the replica's sum of the bucket whose last portion is pending, if one is."""
        before, self._before = self._before, None
        if before is not None:
            self._advance(before, before.count)

    def _advance(self, one: OwnerSum, num_summed: int) -> None:
        """Wait until some portions of a bucket are summed. Each wait makes room for another one."""
        self._fill()
        while one.num_summed < num_summed:
            with self._abandoning():
                self._portions.finish_first()
            self._fill()

    def _fill(self) -> None:
        """Have two portions pending, as far as there are any left."""
        last = self._last
        while last is not None and last.num_started < last.count and len(self._portions) < _NUM_UNDER_WAY:
            with self._abandoning():
                self._portions.start(last.start_next)

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.route.abandon()
            raise
