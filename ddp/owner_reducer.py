"""`OwnerReducer`: our reducer, with buckets that go to the owners of their parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lanes_for_rows
from zero_optim.comm.row_sum import RowSum
from zero_optim.compat.engine import backward_number
from zero_optim.ddp.assignment import BucketAssignment, ReducedParams, ReducerOptions, indices_of_members
from zero_optim.ddp.backward_pass import BackwardPass
from zero_optim.ddp.bucket import ReducerBucket
from zero_optim.ddp.bucket_owners import BucketOwners
from zero_optim.ddp.graph import accumulates
from zero_optim.ddp.inbox import weakly
from zero_optim.ddp.owner_bucket import OwnerBucket
from zero_optim.ddp.reducer import Reducer
from zero_optim.ddp.reduction import Launch, Reduction, SumReduction
from zero_optim.ddp.sparse_owner_bucket import SparseOwnerBucket
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import Pieces
from zero_optim.step.partial import PartialGradient

Accumulate = Literal["owner", "local"]


class OwnerReducer(Reducer):
    """Reduces gradients to the owners of their parameters; all ranks construct it. Communicates.

    Reduced gradients stay at the parameters from pass to pass, and autograd must not add to them what has
    yet to be reduced. So a pass has to begin before autograd adds its first gradient. Not every pass goes
    through an output of the forward pass, nor through that first: a parameter may be used by the loss alone.

    Args:
        params: see `Reducer`.
        optimizer: has every parameter.
        options: see `Reducer`.
        sparse: see `Reducer`.
        wanted: see `Reducer`.
    """

    checks_first = True

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
        self._num_steps_before: int | None = None  # those of the optimizer before the last pass in Join
        self._local_number = -1  # of the last backward pass that was not reduced
        self._lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        super().__init__(
            params,
            optimizer.ranks.process_group,
            options,
            sparse=sparse,
            wanted=wanted,
            checks=False,
        )
        self._inbox.announce(weakly(self._coming))

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

    def check_finished(self, *, waits: bool = True) -> None:
        """Raise, on every rank, what went wrong; see `Reducer.check_finished`.

        Raises:
            ReductionError: see there.
            RuntimeError: inside ``Join`` the pass before had no step, for which ranks that joined wait.
        """
        num_steps, self._num_steps_before = self._num_steps_before, None
        if num_steps == self._optimizer.num_steps and not waits:  # else a new Join begins, or none is meant
            self._optimizer.refuse_in_join(RuntimeError(_NO_STEP))
        super().check_finished(waits=waits)

    # ------------------------------------------------------------------ a backward pass

    def _coming(self, index: int) -> None:
        """Begin a pass that no output has announced, before autograd adds its first gradient to anything."""
        if not accumulates(self.params[index]):  # torch.autograd.grad asks for it
            return
        if self._upcoming.is_reduced(was_prepared=False):
            self._begin()
        else:
            self._check_local()

    def _begin(self) -> BackwardPass:
        self.check_finished(waits=False)
        self._put_aside()
        try:
            return super()._begin()
        except BaseException:
            self._give_back(drops=False)
            raise

    def _finish(self, current: BackwardPass) -> None:
        in_join, before = self._upcoming.in_join, self.history.num_passes
        try:
            super()._finish(current)
            if in_join and self.history.num_passes > before:
                self._num_steps_before = self._optimizer.num_steps
        except BaseException:
            current.give_back(drops=True)
            raise
        current.give_back(drops=False)  # torch.autograd.grad went through an output: no pass at all

    def _put_aside(self) -> None:
        """Keep the gradients of passes that were reduced: autograd would add to them what is yet to be."""
        adds_at_once = self.defers_reports and not self._upcoming.in_join
        for bucket in self.assignment.buckets:
            assert isinstance(bucket, OwnerBucket | SparseOwnerBucket)  # see `assign_to_owners`
            kept = {}
            for slot, (index, param) in enumerate(zip(bucket.indices, bucket.params, strict=True)):
                if param.grad is not None and not self.history.carried[index]:
                    kept[slot], param.grad = param.grad, None
            bucket.begin(kept, adds_at_once=adds_at_once)

    def _give_back(self, *, drops: bool) -> None:
        for bucket in self.assignment.buckets:
            bucket.give_back(drops=drops)

    def _check_local(self) -> None:
        """Look at the gradients, once in a pass whose gradients are added up on this rank alone.

        Raises:
            RuntimeError: there are gradients of a pass that was reduced. Nothing has been added to any.
        """
        number = backward_number()
        if number == self._local_number:
            return
        self._local_number = number
        for name, param in zip(self.names, self.params, strict=True):
            if isinstance(param.grad, PartialGradient):
                raise RuntimeError(  # noqa: TRY004 - the call is wrong, not an argument
                    f"the gradient of {name} has been reduced to its owners: a pass under no_sync() cannot "
                    "add to it. Call zero_grad() first, or put the passes under no_sync() before the one "
                    "that is reduced"
                )

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in one backward pass of the others, with zeros, and keep what this rank owns.

        An owner has its reduced gradients from here; nobody else could lend them to it. Those before have
        been stepped with: inside ``Join`` each reduced pass has a step. This rank's loop has ended, which
        would have dropped them. So does the optimizer when it has stepped with the new ones.
        """
        for param in self.params:
            param.grad = None
        self._put_aside()
        self._optimizer.drop_after_shadow(self.params)
        super().shadow()


_NO_STEP = (
    "inside Join each backward pass that is reduced must be followed by optimizer.step(), as ranks that ran "
    "out of inputs take part in both: step after each batch, or give every rank as many batches and leave "
    "Join out"
)


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
    names, params = reduced.names, reduced.params
    listed = [sorted(indices, reverse=True) for indices in indices_of_members(reduced, members)]
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
