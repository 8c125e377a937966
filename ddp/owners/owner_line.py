"""Buckets on their way to the owners of their gradients, one after the other.

The whole way: a gradient's hook counts, and a full bucket copies gradients, divided, into a row for each
owner (`OwnerBucket.take`); here the row goes to its owner, which adds up all ranks' in their order
(`RowSum`); at the end of the pass ``param.grad`` is the sum on its owner, elsewhere a partial gradient
(`OwnerBucket.give`).

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) the owner adds gradients up in the order of ranks inside a replica;
    then the backend adds its row up over the owners of the same rows in all replicas, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in the order of buckets, as NCCL wants
    it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowSum
from zero_optim.compat.streams import StreamBeside
from zero_optim.ddp.owners.owner_rows import OwnerRows
from zero_optim.ddp.reducer.reduction import Wait
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Then

_NUM_UNDER_WAY = 2  # portions: while one is added, the next one is on its way


@dataclass(slots=True, eq=False)
class OwnerSum:
    """A bucket on its way to its owners, in portions."""

    rows: OwnerRows | None  # until all portions were summed
    take_over: Callable[[Tensor], Tensor]  # takes the sum of this rank's row
    label: str
    num_portions: int
    num_started: int = 0  # portions
    num_summed: int = 0
    result: Tensor | None = None  # of `take_over`

    def next_portion(self) -> tuple[list[Tensor], str]:
        """Return the portion of each row to be sent next, and its label."""
        assert self.rows is not None  # until all were summed
        rows = self.rows.pop(self.num_started)
        self.num_started += 1
        is_one = self.num_portions == 1
        return rows, self.label if is_one else (
            f"{self.label}, portion {self.num_started} of {self.num_portions}"
        )

    def end(self, own: Tensor) -> None:
        """Take the sum of this rank's row."""
        self.result = self.take_over(own)


class OwnerLine:
    """Buckets, of a pass or a hook: the first portion of one is sent while the last of another is summed.

    With ``streams`` an extra stream waits for the sums, and `finish` lets the current one wait for that.
    """

    def __init__(
        self,
        inner: RankGroup,  # the ranks of this replica
        lanes: Lease,  # for exchanges among them
        across: RankGroup | None = None,  # owners of the same rows in all replicas
        *,
        is_apart: bool = True,
        streams: StreamBeside | None = None,
    ) -> None:
        self.inner, self.lanes, self._sum_across = inner, lanes, across
        self._is_apart = is_apart
        self._portions = Flow(_NUM_UNDER_WAY, streams=streams)
        self._across = Flow(1)  # buckets
        self._last: OwnerSum | None = None
        self._before: OwnerSum | None = None  # the one before: its last portion is pending

    def keep_pace(self, fraction: float) -> None:
        """Bring pending portions, but for the last, as far as the bucket that fills, from 0 to 1."""
        self._end()
        last = self._last
        if last is not None:
            self._advance(last, min(int(fraction * last.num_portions), last.num_portions - 1))

    def launch(
        self, rows: Callable[[], OwnerRows], take_over: Callable[[Tensor], Tensor], label: str = ""
    ) -> Wait:
        """Start a bucket, whose ``rows`` are made now; its result is that of ``take_over``."""
        self._end()
        before, self._before = self._last, self._last
        if before is not None:
            self._advance(before, before.num_portions - self._is_apart)
        made = rows()
        self._last = OwnerSum(made, take_over, label, made.num_portions)
        self._advance(self._last, 0)
        return partial(self._finish, self._last)

    def finish(self) -> None:
        """Wait for all buckets; raises what an earlier wait raised."""
        if self._last is not None:
            self._finish(self._last)
        self._last = self._before = None
        self._portions.wait()

    def _finish(self, one: OwnerSum) -> Tensor:
        """Wait for a bucket, and for those before."""
        self._advance(one, one.num_portions)
        while one.result is None:
            with self._abandoning():
                self._across.finish_first()
        return one.result

    def _end(self) -> None:
        """Wait for the replica's sum of the bucket whose last portion is pending."""
        before, self._before = self._before, None
        if before is not None:
            self._advance(before, before.num_portions)

    def _advance(self, one: OwnerSum, num_summed: int) -> None:
        """Wait until some portions of a bucket are summed; each wait makes room for another."""
        with self._abandoning():
            self._fill()
            while one.num_summed < num_summed:
                self._portions.finish_first()
                self._fill()

    def _fill(self) -> None:
        last = self._last
        while (
            last is not None and last.num_started < last.num_portions and len(self._portions) < _NUM_UNDER_WAY
        ):
            device = None if last.rows is None else last.rows.own.device
            self._portions.start(partial(self._start_next, last), device=device)

    def _start_next(self, one: OwnerSum) -> Then:
        """Start the sums of a portion inside the replica, in place."""
        rows, label = one.next_portion()
        work = RowSum(self.inner, self.lanes.groups, rows, in_place=True, about=label)
        return Then([work], lambda _: self._summed(one))

    def _summed(self, one: OwnerSum) -> None:
        """Start the sum across replicas once all portions are summed; without any the bucket has it."""
        one.num_summed += 1
        if one.num_summed < one.num_portions:
            return
        across = self._sum_across
        assert one.rows is not None
        own, one.rows = one.rows.own, None  # nobody else reads it: it alone stays, with the sum

        def begin() -> Then:
            assert across is not None
            work = across.start_sum(own, f"{one.label}, across replicas")[1]
            return Then([work], lambda _: one.end(own))

        if across is not None and own.numel():  # the others have as many
            self._across.start(begin)
        else:
            one.end(own)

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Let nobody else have the lanes if something fails on them, and send no more."""
        try:
            yield
        except BaseException:
            self.lanes.abandon()
            self._last = self._before = None
            raise
