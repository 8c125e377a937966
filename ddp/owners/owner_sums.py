"""Buckets on their way to the owners of their gradients, one after the other.

The whole way: a gradient's hook counts, and a full bucket copies gradients, divided, into a row for each
owner (`OwnerBucket.take`), or a comm hook takes the rows from DDP's bucket (`zero_optim.hooks.owners`); here
the row goes to its owner, which adds up all ranks' in their order (`start_row_sum`); at the end of the pass
``param.grad`` is the sum on its owner, elsewhere a partial gradient (`Owners`).

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) the owner adds gradients up in the order of ranks inside a replica;
    then the backend adds its row up over the owners of the same rows in all replicas, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in the order of buckets, as NCCL wants
    it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.compat.streams import StreamBeside
from zero_optim.ddp.owners.owner_rows import OwnerRows
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending

_NUM_UNDER_WAY = 2  # portions: while one is added, the next one is on its way


class OwnerSums:
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
        self._to_start: deque[tuple[Callable[[], Pending[None]], torch.device]] = deque()  # portions
        self._portions = Flow(_NUM_UNDER_WAY, streams=streams)
        self._across = Flow(1)  # buckets
        self._num_summed = 0  # portions of all buckets, in their order
        self._begin, self._end = 0, 0  # the numbers of the last bucket's portions

    def advance(self, fraction: float) -> None:
        """Bring pending portions, but for the last, as far as the bucket that fills, from 0 to 1."""
        count = self._end - self._begin
        self._advance(self._begin + max(0, min(int(fraction * count), count - 1)))

    def launch(
        self, make_rows: Callable[[], OwnerRows], take_over: Callable[[Tensor], Tensor], label: str = ""
    ) -> Pending[Tensor]:
        """Start a bucket; its result is what ``take_over`` returns of the sum of this rank's row."""
        self._advance(self._end - self._is_apart)
        rows, results = make_rows(), list[Tensor]()
        count = rows.num_portions

        def start(number: int) -> Pending[None]:
            about = label if count == 1 else f"{label}, portion {number + 1} of {count}"
            work = start_row_sum(self.inner, self.lanes.groups, rows.pop(number), in_place=True, about=about)
            return Pending([work], partial(summed, number))

        def summed(number: int, _: object) -> None:
            self._num_summed += 1
            if number == count - 1:
                self._end_bucket(rows.own, label, lambda own: results.append(take_over(own)))

        self._to_start += [(partial(start, number), rows.own.device) for number in range(count)]
        self._begin, self._end = self._end, self._end + count
        self._advance(0)
        end = self._end
        return Pending([], lambda _: self._finish(end, results))

    def _end_bucket(self, own: Tensor, label: str, end: Callable[[Tensor], None]) -> None:
        """Start the sum across replicas, of which the others have as many; without any the bucket ends."""
        across = self._sum_across
        if across is None or not own.numel():
            end(own)
            return

        def begin() -> Pending[None]:
            return Pending([across.start_sum(own, f"{label}, across replicas")], lambda _: end(own))

        self._across.start(begin)

    def finish(self) -> None:
        """Wait for all buckets; raises what an earlier wait raised."""
        self._advance(self._end)
        self._across.wait()
        self._portions.wait()  # of one that was broken off, too
        self._end = self._num_summed

    def _finish(self, end: int, results: list[Tensor]) -> Tensor:
        """Wait for a bucket, and for those before."""
        self._advance(end)
        try:
            while not results:
                self._across.finish_first()
        except BaseException:
            self._abandon()
            raise
        return results[0]

    def _advance(self, num_summed: int) -> None:
        """Wait until some portions are summed; each wait makes room for another."""
        try:
            self._fill()
            while self._num_summed < num_summed:
                self._portions.finish_first()
                self._fill()
        except BaseException:
            self._abandon()
            raise

    def _fill(self) -> None:
        while self._to_start and len(self._portions) < _NUM_UNDER_WAY:
            begin, device = self._to_start.popleft()
            self._portions.start(begin, device=device)

    def _abandon(self) -> None:
        """Let nobody else have the lanes, on which something failed, and start no more."""
        self.lanes.abandon()
        self._to_start.clear()
        self._end = self._num_summed
