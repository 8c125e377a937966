"""Buckets on their way to the owners of their gradients, one after the other.

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) the owner adds gradients up in the order of ranks inside a replica;
    then the backend adds its row up over the owners of the same rows in all replicas, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in the order of buckets, as NCCL wants
    it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import Bring, ReceiveBuffer, start_in_stages
from zero_optim.ddp.owners.owner_storage import OwnerRows
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending


class OwnerSums:
    """The buckets of a pass: one is sent when the one before is summed."""

    def __init__(
        self,
        rows: Mapping[int, OwnerRows],  # of dense gradients, by the bucket's number
        everyone: RankGroup,
        inner: RankGroup,  # the ranks of this replica
        lanes: Lease,  # for exchanges among them
        across: RankGroup | None,  # owners of the same rows in all replicas
        *,
        adds_at_once: bool,  # Note [Sums apart] in `owner_storage`
    ) -> None:
        self._rows, self._everyone, self._inner = rows, everyone, inner
        self._lanes, self._across, self._adds = lanes, across, adds_at_once
        self._received = ReceiveBuffer()
        # Of sums, of what brings them to owners, and of sums across replicas; each of one bucket at a time.
        self._flows = Flow(1), Flow(1), Flow(1)

    def launch(self, bucket: ReducerBucket, has_failed: bool) -> Pending[Tensor]:
        """Start a bucket; the result is what it returns as it takes the sum of this rank's row over."""
        storage = self._rows.get(bucket.number)
        if storage is None:  # a sparse gradient: every rank gets the sum
            with self._lanes:
                for flow in self._flows:
                    flow.wait()
            return self._everyone.start_sum(bucket.storage.flat, bucket.label)
        results: list[Tensor] = []
        sums, bringing, replicas = self._flows
        with self._lanes:  # nobody else shall have them if something fails
            while len(sums):
                sums.finish_first()
            flat, rows = storage.rows(has_failed=has_failed)
            work, bring = start_in_stages(
                self._inner, self._lanes.groups, flat, rows, self._received, bucket.label
            )
            stages = [] if bring is None else [(bringing, bring)]
            across, take_over = self._across, partial(storage.take_over, adds=self._adds)
            if across is not None and rows.rows[rows.rank]:  # of which all replicas have as many
                about = f"{bucket.label}, across replicas"
                stages.append((replicas, lambda total: across.start_sum(total, about)))
            end = partial(self._go_on, stages, lambda total: results.append(take_over(total)))
            sums.start(partial(Pending, [work], end))
        return Pending([], partial(self._finish, results))

    def _go_on(
        self, stages: list[tuple[Flow, Bring]], end: Callable[[Tensor], None], totals: list[Tensor]
    ) -> None:
        """Start the next stage of a bucket, behind that of the bucket before; without any the bucket ends."""
        total = totals[0]
        if not stages:
            end(total)
            return
        (flow, stage), *later = stages
        go_on = partial(self._go_on, later, end)
        flow.start(lambda: Pending([stage(total)], go_on))

    def _finish(self, results: list[Tensor], _: list[object]) -> Tensor:
        """Wait for a bucket, and for those before."""
        while not results:
            with self._lanes:
                next(flow for flow in self._flows[::-1] if len(flow)).finish_first()
        return results[0]
