"""Buckets on their way to the owners of their gradients, one after the other.

The whole way: a gradient's hook counts, and a full bucket copies gradients, divided, into a row for each
owner (`OwnerBucket.take`); here the row goes to its owner, which adds up all ranks' in their order
(`start_row_sum`); at the end of the pass ``param.grad`` is the sum on its owner, elsewhere a partial gradient
(`OwnerBucket.give`).

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) the owner adds gradients up in the order of ranks inside a replica;
    then the backend adds its row up over the owners of the same rows in all replicas, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in the order of buckets, as NCCL wants
    it.

"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.pending import Pending
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_rows import OwnerRows
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.flow.flow import Flow

_NUM_UNDER_WAY = 2  # portions: while one is added, the next one is on its way


@dataclass(slots=True, eq=False)
class OwnerSum:
    """A bucket on its way to its owners, in portions."""

    bucket: OwnerBucket
    rows: OwnerRows | None  # until all portions were summed
    num_started: int = 0  # portions
    num_summed: int = 0
    word: Tensor | None = None  # of a failure; one element, or none. Once the bucket has the sum


class OwnerLine:
    """The buckets of one pass: the first portion of one is sent while the last of another is summed."""

    def __init__(
        self,
        inner: RankGroup,  # the ranks of this replica
        lanes: Lease,  # for exchanges among them
        across: RankGroup | None,  # owners of the same rows in all replicas
        everyone: RankGroup,
        *,
        is_apart: bool = True,
    ) -> None:
        self._inner, self._lanes, self._sum_across = inner, lanes, across
        self._everyone = everyone
        self._is_apart = is_apart
        self._portions = Flow(_NUM_UNDER_WAY)
        self._across = Flow(1)  # buckets
        self._last: OwnerSum | None = None
        self._before: OwnerSum | None = None  # the one before: its last portion is pending

    def keep_pace(self, fraction: float) -> None:
        """Bring pending portions, but for the last, as far as the bucket that fills, from 0 to 1."""
        self._end()
        last = self._last
        if last is not None:
            count = last.bucket.num_portions
            self._advance(last, min(int(fraction * count), count - 1))

    def launch(self, bucket: ReducerBucket) -> Pending[Tensor]:
        """Start a bucket; its result is its word of a failure."""
        assert isinstance(bucket, OwnerBucket)  # see `OwnerReducer`
        self._end()
        before, self._before = self._last, self._last
        if before is not None:
            self._advance(before, before.bucket.num_portions - (self._is_apart and not bucket.is_sparse))
        if bucket.is_sparse:
            self._last = None
            return self._everyone.start_sum(bucket.flat, bucket.label)
        self._last = last = OwnerSum(bucket, bucket.rows())
        self._fill()
        return Pending([], lambda _: self._finish(last))

    def _finish(self, one: OwnerSum) -> Tensor:
        """Wait for a bucket, and for those before."""
        self._advance(one, one.bucket.num_portions)
        while one.word is None:
            with self._abandoning():
                self._across.finish_first()
        return one.word

    def _end(self) -> None:
        """Wait for the replica's sum of the bucket whose last portion is pending."""
        before, self._before = self._before, None
        if before is not None:
            self._advance(before, before.bucket.num_portions)

    def _advance(self, one: OwnerSum, num_summed: int) -> None:
        """Wait until some portions of a bucket are summed; each wait makes room for another."""
        self._fill()
        while one.num_summed < num_summed:
            with self._abandoning():
                self._portions.finish_first()
            self._fill()

    def _fill(self) -> None:
        last = self._last
        while (
            last is not None
            and last.num_started < last.bucket.num_portions
            and len(self._portions) < _NUM_UNDER_WAY
        ):
            with self._abandoning():
                self._portions.start(partial(self._start_next, last))

    def _start_next(self, one: OwnerSum) -> Pending[None]:
        """Start the sums of a portion inside the replica, in place."""
        count = one.bucket.num_portions
        assert one.rows is not None  # until all were summed
        rows = one.rows.pop(one.num_started)
        one.num_started += 1
        label = (
            one.bucket.label if count == 1 else f"{one.bucket.label}, portion {one.num_started} of {count}"
        )
        work = start_row_sum(self._inner, self._lanes.groups, rows, in_place=True, about=label)
        return Pending([work], partial(self._summed, one))

    def _summed(self, one: OwnerSum, _: object) -> None:
        """Start the sum across replicas once all portions are summed; without any the bucket has it."""
        one.num_summed += 1
        if one.num_summed < one.bucket.num_portions:
            return
        across = self._sum_across
        assert one.rows is not None
        own, one.rows = one.rows.own, None  # nobody else reads it: it alone stays, with the sum

        def take_over(_: object) -> None:
            one.word = one.bucket.take_over(own)

        def begin() -> Pending[None]:
            assert across is not None
            return Pending([across.start_sum(own, f"{one.bucket.label}, across replicas")], take_over)

        if across is not None and own.numel():  # the others have as many
            self._across.start(begin)
        else:
            take_over(None)

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Let nobody else have the lanes if something fails on them."""
        try:
            yield
        except BaseException:
            self._lanes.abandon()
            raise
