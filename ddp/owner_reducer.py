"""`OwnerReducer`: our reducer, with buckets that go to the owners of their parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside
from zero_optim.comm.row_sum import RowSum
from zero_optim.compat.streams import is_asynchronous
from zero_optim.ddp.assignment import BucketAssignment, ReducedParams, ReducerOptions
from zero_optim.ddp.backward_pass import BackwardPass
from zero_optim.ddp.bucket import ReducerBucket
from zero_optim.ddp.owner_bucket import BucketOwners, OwnerBucket, SparseOwnerBucket
from zero_optim.ddp.reducer import Reducer
from zero_optim.ddp.reduction import Launch, Reduction, SumReduction
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import Pieces
from zero_optim.step.partial import PartialGradient

Accumulate = Literal["owner", "local"]


class OwnerReducer(Reducer):
    """Reduces gradients to the owners of their parameters; all ranks construct it. Communicates.

    Args:
        params: see `Reducer`.
        optimizer: has every parameter.
        options: see `Reducer`.
        sparse: see `Reducer`.
        wanted: see `Reducer`.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        optimizer: ZeroRedundancyOptimizer,
        options: ReducerOptions,
        *,
        sparse: Sequence[str],
        wanted: Callable[[bool], bool],
    ) -> None:
        self._optimizer = optimizer
        self._lanes = _lanes(optimizer.ranks, optimizer.owners())
        super().__init__(
            params,
            optimizer.ranks.process_group,
            options,
            sparse=sparse,
            wanted=wanted,
            checks=False,
        )

    def rebuild(self) -> bool:
        """Do nothing: buckets are those of the optimizer."""
        return False

    def _assigned(self, order: Sequence[int] | None) -> BucketAssignment:
        optimizer = self._optimizer
        return assign_to_owners(
            self._reduced, self.options, optimizer.bucket_members(), optimizer.pieces(), optimizer.ranks
        )

    def _launcher(self) -> Launch:
        return reducing_to_owners(self._group, self._lanes, self._assignment.labels)

    # ------------------------------------------------------------------ a backward pass

    def _begin(self) -> BackwardPass:
        self.check_finished(waits=False)
        self._put_aside()
        return super()._begin()

    def _put_aside(self) -> None:
        """Keep the gradients of passes that were reduced: autograd would add to them what is yet to be."""
        for bucket in self.assignment.buckets:
            assert isinstance(bucket, OwnerBucket | SparseOwnerBucket)  # see `assign_to_owners`
            kept = {}
            for slot, (index, param) in enumerate(zip(bucket.indices, bucket.params, strict=True)):
                if param.grad is not None and not self.history.carried[index]:
                    kept[slot], param.grad = param.grad, None
            bucket.begin(kept)

    def begin_local(self) -> None:
        """Get ready for a pass whose gradients are added up on this rank alone.

        Raises:
            RuntimeError: there are gradients of a pass that was reduced.
        """
        for name, param in zip(self.names, self.params, strict=True):
            grad = param.grad
            if isinstance(grad, PartialGradient):
                if not grad.is_zero:
                    raise RuntimeError(
                        f"the gradient of {name} has been reduced to its owners: a pass under no_sync() "
                        "cannot add to it. Call zero_grad() first, or put the passes under no_sync() before "
                        "the one that is reduced"
                    )
                param.grad = None

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in one backward pass of the others, with zeros, and keep what this rank owns.

        An owner has its reduced gradients from here; nobody else could lend them to it. Those before have
        been stepped with: inside ``Join`` each reduced pass has a step. This rank's loop has ended, which
        would have dropped them.
        """
        for param in self.params:
            param.grad = None
        self._put_aside()
        super().shadow()


def assign_to_owners(
    reduced: ReducedParams,
    options: ReducerOptions,
    members: Sequence[Sequence[Tensor]],
    pieces: dict[Tensor, Pieces],
    group: RankGroup,
) -> BucketAssignment:
    """Make buckets with the members of the optimizer's, the last parameter first. Does not communicate.

    In this order gradients come, or about so. A sparse gradient has a bucket of its own.

    Args:
        reduced: the parameters whose gradients are reduced.
        options: of the reducer.
        members: of the optimizer's buckets.
        pieces: who owns what.
        group: the ranks.
    """
    index_of, names, params = reduced.index_of, reduced.names, reduced.params
    listed: list[list[int]] = []
    for of_bucket in members:
        here = sorted((index_of[id(param)] for param in of_bucket if id(param) in index_of), reverse=True)
        listed += [[index] for index in here if names[index] in reduced.sparse]
        dense = [index for index in here if names[index] not in reduced.sparse]
        listed += [dense] if dense else []
    listed.sort(key=min, reverse=True)
    is_sparse = [names[indices[0]] in reduced.sparse for indices in listed]
    if False in is_sparse:  # the last one carries the word of a failure, see `OwnerBucket`
        last = len(listed) - 1 - is_sparse[::-1].index(False)
        listed.append(listed.pop(last))
    buckets: list[ReducerBucket] = []
    for indices in listed:
        of_bucket = [params[index] for index in indices]
        owners = BucketOwners(
            tuple(names[index] for index in indices),
            tuple(pieces[param] for param in of_bucket),
            group.rank,
            group.size,
        )
        dtype = options.reduce_dtype if of_bucket[0].is_floating_point() else None
        if names[indices[0]] in reduced.sparse:
            buckets.append(SparseOwnerBucket(indices[0], of_bucket[0], owners, dtype=dtype))
        else:
            is_last = indices is listed[-1]
            buckets.append(OwnerBucket(indices, of_bucket, owners, dtype=dtype, carries_word=is_last))
    return BucketAssignment.of(names, buckets)


class OwnerSum:
    """A bucket on its way to its owners.

    Args:
        group: the ranks.
        lanes: see `RowSum`.
        bucket: the gradients, divided.
        label: names the bucket in messages.
    """

    def __init__(self, group: RankGroup, lanes: Lease, bucket: OwnerBucket, label: str) -> None:
        self._bucket = bucket
        self._lanes = lanes
        self._word: Tensor | None = None
        # Nobody else reads the own row. So of all that was sent and received one row stays, the sum.
        rows = bucket.pop_rows()
        self._total: RowSum | None = RowSum(group, lanes.groups, rows, in_place=True, about=label)

    def wait(self) -> Tensor:
        """Wait for the sum, and have the bucket take it over; a second call gives the same.

        Returns:
            The word of a failure, see `OwnerBucket.settle`.
        """
        if self._word is None:
            assert self._total is not None  # until there is a word
            total, self._total = self._total, None
            try:
                self._word = self._bucket.settle(total.wait())
            except BaseException:
                self._lanes.abandon()
                raise
        return self._word


def reducing_to_owners(group: RankGroup, lanes: Lease, labels: Sequence[str]) -> Launch:
    """Make what starts the buckets of one pass, each when the one before is summed.

    See Note [Memory of sharded gradients] in `owner_bucket`.

    Args:
        group: the ranks.
        lanes: for the exchange.
        labels: name the buckets in messages, by number.
    """
    under_way: list[OwnerSum] = []

    def launch(bucket: ReducerBucket, number: int, is_last: bool) -> Reduction:
        if under_way:
            under_way.pop().wait()
        if not isinstance(bucket, OwnerBucket):
            return SumReduction(group, bucket, labels[number])
        started = OwnerSum(group, lanes, bucket, labels[number])
        under_way.append(started)
        return started

    return launch


def _lanes(group: RankGroup, params: Iterable[Tensor]) -> Lease:
    """Take process groups for the exchange on gloo; elsewhere two communicators could wait for each other."""
    on_cpu = not any(is_asynchronous(device) for device in {param.device for param in params})
    return lanes_beside(group) if on_cpu and group.data_backend == "gloo" else Lease.of(group)
