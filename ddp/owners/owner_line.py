"""Buckets on their way to the owners of their gradients, one after the other.

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) gradients are added up twice: in the order of ranks inside a replica,
    by the owner; then its row over the owners of the same rows in all replicas, by the backend, in place. The
    second sum starts when the first one is there, which is when the next bucket is launched, and is waited
    for one bucket later. So each bucket has the time of another one for it, and no more than two rows are
    under way. All replicas get the bits of one sum. In bf16 and fp16 the sum of a replica is rounded, and the
    backend adds these sums in that dtype. The word of a failure is summed with its row, so every
    rank of the mesh reads it.

    Sums of a replica and sums across it use different communicators. All ranks start both in one order, that
    of the buckets, as NCCL wants it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_route import SumRoute
from zero_optim.ddp.owners.owner_rows import OwnerRows
from zero_optim.ddp.reducer.bucket import ReducerBucket
from zero_optim.ddp.reducer.reduction import Reduction, SumReduction

if TYPE_CHECKING:
    from zero_optim.comm.traffic import Waitable

_NUM_UNDER_WAY = 2  # portions: while one is added, the next one is on its way


class OwnerSum:
    """A bucket on its way to its owners, in portions, of which two are under way at a time.

    One is sent at once, the others as others come.

    Args:
        bucket: the gradients, divided.
        rows: popped from it.
        label: names the bucket in messages.
        route: how they get to their owners; of this bucket alone.
    """

    def __init__(self, bucket: OwnerBucket, rows: OwnerRows, label: str, route: SumRoute) -> None:
        self._bucket = bucket
        self._label = label
        self._route = route
        self._rows: OwnerRows | None = rows
        self._total: Tensor | None = None  # of the replica, then of all
        self._failure_word = bucket.word
        self._sums: deque[Waitable] = deque()
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
        self._sums.append(self._route.start(rows, label))

    def advance_to(self, fraction: float) -> None:
        """Wait until some part of the portions is summed, but never for the last one.

        Args:
            fraction: from 0 to 1.
        """
        self.fill()
        count = self._bucket.num_portions
        while self._num_done < min(int(fraction * count), count - 1):
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the portion that was sent first, which makes room for another one, and send that."""
        try:
            self._sums.popleft().wait()
            self._num_done += 1
            self.fill()
        except BaseException:
            self._rows = None
            self._route.abandon()
            raise

    def hand_on(self) -> None:
        """Wait for the sum of the replica, and start the one across replicas; a second call does nothing.

        Where there is one replica alone, have the bucket take the sum over.
        """
        if self._total is not None or self._word is not None:
            return
        self.fill()
        while self._sums:
            self._finish_first()
        assert self._rows is not None  # nothing has failed
        rows, self._rows = self._rows, None
        if self._route.goes_across:
            self._route.start_across(rows.own, self._label)
        self._total = rows.own
        if not self._route.goes_across:
            self.wait()

    def wait(self) -> Tensor:
        """Wait for the sum, and have the bucket take it over; a second call gives the same.

        Returns:
            The word of a failure, see `OwnerBucket.settle`.
        """
        self.hand_on()
        if self._word is None:
            self._route.wait_across()
            assert self._total is not None  # it was handed on
            self._word = self._bucket.settle(self._total)
            self._total = None
        return self._word


class OwnerLine:
    """The buckets of one pass, one after the other.

    Of a bucket, the first portion is sent while the last one of the bucket before is under way: see Note
    [Memory of sharded gradients] in `owner_bucket`. So the network has work while sums are made.

    Args:
        routes: makes the route of a bucket.
        labels: name the buckets in messages, by number.
        everyone: the ranks of all replicas.
        is_apart: lanes are process groups of their own. If not, a bucket is launched when the one before is
            summed.
    """

    def __init__(
        self,
        routes: Callable[[], SumRoute],
        labels: Sequence[str],
        everyone: RankGroup,
        *,
        is_apart: bool = True,
    ) -> None:
        self._routes = routes
        self._labels = labels
        self._everyone = everyone
        self._is_apart = is_apart
        self._under_way: OwnerSum | None = None
        self._ending: OwnerSum | None = None  # the one before: its last portion is under way
        self._handed_on: OwnerSum | None = None  # the one before that

    def keep_pace(self, fraction: float) -> None:
        """Bring what is under way as far as the bucket that fills is.

        Args:
            fraction: of that bucket, which is filled; from 0 to 1.
        """
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
        self._under_way = OwnerSum(bucket, bucket.pop_rows(), label, self._routes())
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
