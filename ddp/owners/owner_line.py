"""Buckets on their way to the owners of their gradients, one after the other.

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) gradients are added up in the order of ranks inside a replica, by the
    owner; then its row over the owners of the same rows in all replicas, by the backend, in place. The second
    sum starts when the next bucket is launched, and is waited for one bucket later. In bf16 and fp16 the sum
    of a replica is rounded. The word of a failure is summed with its row. All ranks start sums in one order,
    that of the buckets, as NCCL wants it.

Note [Sums inside, then across]
    With state over all ranks of a mesh each rank owns a row. Inside a replica of S ranks, rank s receives the
    rows of its column, the ranks with its number in all R replicas, and adds up in the order of ranks. Then
    the column exchanges these sums, and each adds up its own row in the order of replicas. That sends (R - 1)
    / (R S) of the gradients' bytes across, half of what an all-reduce takes; on two replicas it has the same
    bits. Until they are waited for, one bucket later, sums of the column's other rows are held, 1/S of the
    bucket.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowSum
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.rows import OwnerRows
from zero_optim.ddp.reducer.bucket import ReducerBucket
from zero_optim.ddp.reducer.reduction import Reduction, SumReduction

if TYPE_CHECKING:
    from zero_optim.comm.traffic import Waitable

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

    def abandon(self) -> None:
        """Let nobody else have the lanes, because something failed on them."""
        self.lanes.abandon()
        if self.lanes_across is not None:
            self.lanes_across.abandon()


class OwnerSum:
    """A bucket on its way to its owners, in portions, of which two are under way at a time."""

    def __init__(self, bucket: OwnerBucket, rows: OwnerRows, label: str, route: SumRoute) -> None:
        self._bucket = bucket
        self._label = label
        self._route = route
        self._rows: OwnerRows | None = rows
        self._total: Tensor | None = None  # of the replica, then of all
        self._failure_word = bucket.word
        self._sums: deque[tuple[str, list[RowSum]]] = deque()
        self._across: list[Waitable] = []
        self._num_done = 0
        self._word: Tensor | None = None
        self._start_next()

    def fill(self) -> None:
        """Have two portions under way, as far as there are any left."""
        while len(self._sums) < min(_NUM_UNDER_WAY, self._bucket.num_portions - self._num_done):
            self._start_next()

    def _start_next(self) -> None:
        number, count = self._num_done + len(self._sums), self._bucket.num_portions
        assert self._rows is not None  # until all were waited for
        rows = self._rows.pop(number, word=self._failure_word)
        label = self._label if count == 1 else f"{self._label}, portion {number + 1} of {count}"
        # Nobody else reads the own row. So of all that was sent and received it alone stays, with the sum.
        self._sums.append((label, self._route.start(rows, label)))

    def advance_to(self, fraction: float) -> None:
        """Wait until some part of the portions is summed, from 0 to 1, but never for the last one."""
        self.fill()
        count = self._bucket.num_portions
        while self._num_done < min(int(fraction * count), count - 1):
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the portion that was sent first, which makes room for another one, and send that."""
        label, sums = self._sums.popleft()
        route = self._route
        try:
            totals = [each.wait() for each in sums]
            if route.across is not None and route.lanes_across is not None:
                about = f"{label}, across replicas"
                lanes = route.lanes_across.groups
                self._across.append(RowSum(route.across, lanes, totals, in_place=True, about=about))
            self._num_done += 1
            self.fill()
        except BaseException:
            self._rows = None
            route.abandon()
            raise

    def hand_on(self) -> None:
        """Wait for the sum of the replica, and start the one across, if any; a second call does nothing."""
        if self._total is not None or self._word is not None:
            return
        self.fill()
        while self._sums:
            self._finish_first()
        assert self._rows is not None  # nothing has failed
        rows, self._rows = self._rows, None
        self._total = rows.own
        route = self._route
        if route.across is None:
            self.wait()
        elif route.lanes_across is None and self._total.numel():  # the others have as many
            _, work = route.across.start_sum(self._total, f"{self._label}, across replicas")
            self._across.append(work)

    def wait(self) -> Tensor:
        """Wait for the sum, which the bucket takes over; gives the word of a failure, any number of times."""
        self.hand_on()
        if self._word is None:
            for work in self._across:
                work.wait()
            assert self._total is not None  # it was handed on
            self._word = self._bucket.take_over(self._total)
            self._total, self._across = None, []
        return self._word


class OwnerLine:
    """The buckets of one pass, one after the other: the first portion of one while the last of another ends.

    So the network has work while sums are made; see Note [Memory of sharded gradients] in `owner_bucket`.
    Unless lanes are apart, on process groups of their own, a bucket is launched when the one before is
    summed.
    """

    def __init__(
        self, route: SumRoute, labels: Sequence[str], everyone: RankGroup, *, is_apart: bool = True
    ) -> None:
        self._route = route
        self._labels = labels
        self._everyone = everyone
        self._is_apart = is_apart
        self._under_way: OwnerSum | None = None
        self._ending: OwnerSum | None = None  # the one before: its last portion is under way
        self._handed_on: OwnerSum | None = None  # the one before that

    def keep_pace(self, fraction: float) -> None:
        """Bring what is under way as far as the bucket that fills is, from 0 to 1."""
        self._end()
        if self._under_way is not None:
            self._under_way.advance_to(fraction)

    def launch(self, bucket: ReducerBucket, number: int, is_last: bool) -> Reduction:
        """Start a bucket; see `Launch`."""
        self._end()
        self._ending, self._under_way = self._under_way, None
        if self._ending is not None and self._is_apart and isinstance(bucket, OwnerBucket):
            self._ending.advance_to(1.0)
        else:
            self._end()
        label = self._labels[number]
        if not isinstance(bucket, OwnerBucket):
            return SumReduction(self._everyone, bucket, label)
        self._under_way = OwnerSum(bucket, bucket.pop_rows(), label, self._route)
        if self._ending is None:
            self._under_way.fill()
        return self._under_way

    def _end(self) -> None:
        """Wait for the replica's sum of the bucket whose last portion is under way, if one is."""
        ending, self._ending = self._ending, None
        if ending is None:
            return
        ending.hand_on()
        if self._handed_on is not None:
            self._handed_on.wait()
        self._handed_on = ending
