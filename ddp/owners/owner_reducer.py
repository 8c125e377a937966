"""`OwnerReducer`: our reducer, with buckets that go to the owners of their parameters."""

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakMethod

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.comm.mesh import RankMesh, agree_between_replicas
from zero_optim.compat.autograd import backward_number
from zero_optim.ddp.owners.owner_storage import OwnerRows, Owners
from zero_optim.ddp.owners.owner_sums import OwnerSums
from zero_optim.ddp.owners.replica_check import ReplicaCheck
from zero_optim.ddp.reducer.assignment import BucketAssignment, ReducerOptions
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.gradient_storage import BucketGradients, GradientStorage, SparseGradients
from zero_optim.ddp.reducer.graph import accumulates
from zero_optim.ddp.reducer.inbox import Ties, weakly
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.ddp.reducer.reduction import Launch
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.strides import kept_dtype
from zero_optim.step.partial import PartialGradient
from zero_optim.step.unreduced import reducers_with


class OwnerReducer(Reducer):
    """Reduces gradients to the owners of their parameters; all ranks construct it. Communicates.

    A pass begins before autograd adds its first gradient to what is reduced.
    """

    checks_first = True

    def __init__(
        self,
        params: Sequence[tuple[str, Tensor]],
        optimizer: ZeroRedundancyOptimizer,
        options: ReducerOptions,
        ties: Ties,
        *,
        sparse: Sequence[str],
        mesh: RankMesh | None = None,
    ) -> None:
        everyone = optimizer.ranks if mesh is None else mesh.everyone
        with failing_together(everyone):
            optimizer.core.check_sparse(param for name, param in params if name in sparse)
        if mesh is not None:
            agree_between_replicas(everyone, optimizer.core.describe())
        optimizer.core.engine.reduce_to_owners()
        self._optimizer = optimizer
        self._check: ReplicaCheck | None = None
        self._local_number = -1  # of the last backward pass that was not reduced
        lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        caps = (optimizer.core.sharding.cap_nbytes,)  # buckets are those of the optimizer
        super().__init__(
            params,
            everyone.process_group,
            replace(options, bucket_caps_nbytes=caps),
            replace(ties, coming=weakly(self._coming)),
            sparse,
        )
        phase = self._summing.phase
        across = None if mesh is None else replace(mesh.across, phase=phase)
        self._route = replace(optimizer.ranks, phase=phase), lanes, across
        if mesh is not None:
            self._check = ReplicaCheck(replace(mesh.across, phase=self.group.phase), optimizer)
        for other in reducers_with(set(self.params)):
            if isinstance(other, OwnerReducer) and other is not self:
                other.retire()
        self._is_expected = True  # modules may be called before the first forward pass of the whole

    def rebuild(self) -> bool:
        """Do nothing: buckets are those of the optimizer."""
        return False

    def _assigned(self, order: Sequence[int] | None) -> BucketAssignment:
        engine, reduced, params, owners = self._ties.engine, self._reduced, self.params, self._owners()
        index_lists: list[list[int]] = []
        for bucket in engine.buckets:
            here = [reduced.index_of[id(param)] for param in bucket.params if id(param) in reduced.index_of]
            index_lists += [[index] for index in here if reduced.is_sparse(index)]
            index_lists.append([index for index in here if not reduced.is_sparse(index)])
        index_lists = sorted(filter(None, index_lists), key=min, reverse=True)  # as they become full
        if self.options.may_be_unused:
            index_lists.sort(key=lambda indices: params[indices[0]] in self._ties.last)
        dense = [at for at, indices in enumerate(index_lists) if not reduced.is_sparse(indices[0])]
        for at in dense[-1:]:  # the last one carries the word of a failure
            index_lists.append(index_lists.pop(at))

        self._rows: dict[int, OwnerRows] = {}  # of dense gradients, by the bucket's number
        buckets = list[ReducerBucket]()
        for number, indices in enumerate(index_lists):
            members = BucketGradients(sorted(indices, reverse=True), reduced, self.options)
            is_last = number == len(index_lists) - 1
            if members.is_sparse:
                storage: GradientStorage = SparseGradients(members, members.pop, owners.shown_sparse)
            else:
                storage = self._rows[number] = OwnerRows(members, owners, carries_word=is_last)
            schedule = engine.buckets_of([params[indices[0]]])[0].schedule  # of the one with all of them
            buckets.append(ReducerBucket(members, storage, number, is_last=is_last, schedule=schedule))
        return BucketAssignment.of(self.names, buckets)

    def _owners(self) -> Owners:
        optimizer, dtypes = self._optimizer, dict[Tensor, torch.dtype]()
        for param in self.params:
            kept, reduced = kept_dtype(param), self.options.dtype_of(param) or param.dtype
            both = kept if kept == param.dtype else torch.promote_types(kept, reduced)
            if both != param.dtype:
                dtypes[param] = both
        return Owners(
            optimizer.pieces(),
            dict(zip(self.params, self.names, strict=True)),
            optimizer.ranks.rank,
            optimizer.ranks.size,
            WeakMethod(optimizer.iteration.agree_on_infinity),
            optimizer.core.inputs.store.rows,
            dtypes,
        )

    def check_finished(self, *, waits: bool = True) -> None:
        """Do as `Reducer.check_finished`; RankMismatchError, on every rank, if replicas differ."""
        super().check_finished(waits=waits)
        if waits and self._check is not None:
            self._check.read()

    def _coming(self, index: int) -> None:
        """Begin an unannounced pass, before autograd adds its first gradient."""
        if not accumulates(self.params[index]):  # torch.autograd.grad asks for it
            return
        if self._ties.wanted(self._is_expected):
            self._begin()
            return
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

    def _open(self) -> Launch:
        """Put reduced gradients aside: autograd would add unreduced ones to them."""
        if self._check is not None:
            self._check.start()
        sums = OwnerSums(self._rows, self._summing, *self._route, adds_at_once=self.defers_reports)
        for bucket in self.assignment.buckets:
            bucket.members.begin(self.unreduced)
        return sums.launch

    def _finish(self, current: BackwardPass) -> None:
        super()._finish(current)
        if self._check is not None and not self.defers_reports:
            self._check.read()
