"""`OwnerReducer`: our reducer, with buckets that go to the owners of their parameters, one after the other.

Note [Sums across replicas]
    In a mesh (`zero_optim.comm.mesh`) the owner adds gradients up in the order of ranks inside a replica;
    then the backend adds its row up over the owners of the same rows in all replicas, in place. The second
    sum is waited for before that of the next bucket starts. In bf16 and fp16 the sum of a replica is rounded.
    The word of a failure is summed with its row. All ranks start sums in the order of buckets, as NCCL wants
    it.

Note [Replicas that drift]
    Parameters of replicas stay equal as long as each takes the same steps, and nothing of them is gathered.
    So the owners of the same rows gather stamps of their last step beside each backward pass. Where these
    differ, all raise; on an accelerator in the next pass.

Note [Failures in one replica]
    A rank that raises a failure of its replica sends its next stamp at once, with the message, and waits for
    nothing: it may never begin another backward pass. On the CPU stamps are read before the pass has launched
    anything. Only failures of which all ranks of a replica hear, in gathers, are told.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, ranks_text
from zero_optim.comm.lanes import Lease, lanes_for_rows
from zero_optim.comm.mesh import RankMesh, agree_between_replicas
from zero_optim.comm.row_sum import Bring, ReceiveBuffer, start_in_stages
from zero_optim.compat.autograd import backward_number
from zero_optim.compat.streams import is_asynchronous, to_device
from zero_optim.ddp.owners.owner_bucket import OwnerBucket, Owners
from zero_optim.ddp.reducer.assignment import BucketAssignment, ReducerOptions
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.graph import accumulates
from zero_optim.ddp.reducer.inbox import Ties, weakly
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.ddp.reducer.reduction import Launch
from zero_optim.errors import RankMismatchError, RemoteRankError, message_of
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import STAMP_NBYTES, Arrival, Stamp, parted
from zero_optim.health.stamps import Options, options_text, shortened
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.option_values import OptionValues, differing
from zero_optim.plan.strides import kept_dtype
from zero_optim.step.partial import PartialGradient
from zero_optim.step.unreduced import reducers_with

# The options of this rank at the start of a pass, and the stamps of all replicas.
_Gather: TypeAlias = tuple[Options, Pending[dict[int, Stamp]]]


class OwnerSums:
    """The buckets of a pass: one is sent when the one before is summed."""

    def __init__(
        self,
        buckets: Sequence[OwnerBucket],  # by number
        everyone: RankGroup,
        inner: RankGroup,  # the ranks of this replica
        lanes: Lease,  # for exchanges among them
        across: RankGroup | None = None,  # owners of the same rows in all replicas
    ) -> None:
        self._buckets, self._everyone, self._inner = buckets, everyone, inner
        self._lanes, self._across = lanes, across
        self._received = ReceiveBuffer()
        # Of sums, of what brings them to owners, and of sums across replicas; each of one bucket at a time.
        self._flows = Flow(1), Flow(1), Flow(1)

    def launch(self, full: ReducerBucket) -> Pending[Tensor]:
        """Start a bucket; the result is what it returns as it takes the sum of this rank's row over."""
        bucket = self._buckets[full.number]
        if bucket.is_sparse:  # every rank gets the sum
            with self._lanes:
                for flow in self._flows:
                    flow.wait()
            return self._everyone.start_sum(bucket.flat, bucket.label)
        results: list[Tensor] = []
        sums, bringing, replicas = self._flows
        with self._lanes:  # nobody else shall have them if something fails
            while len(sums):
                sums.finish_first()
            flat, rows = bucket.rows()
            work, bring = start_in_stages(
                self._inner, self._lanes.groups, flat, rows, self._received, bucket.label
            )
            stages = [] if bring is None else [(bringing, bring)]
            across = self._across
            if across is not None and rows.rows[rows.rank]:  # of which all replicas have as many
                about = f"{bucket.label}, across replicas"
                stages.append((replicas, lambda total: across.start_sum(total, about)))
            end = partial(self._go_on, stages, lambda total: results.append(bucket.take_over(total)))
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


class ReplicaCheck:
    """Compares the optimizers of the ranks that own the same rows, which make the same calls."""

    def __init__(self, across: RankGroup, optimizer: ZeroRedundancyOptimizer) -> None:
        self._across = across.during("agree")
        self._optimizer = optimizer
        self._values = OptionValues()
        self._pending: _Gather | None = None
        self._sent: list[_Gather] = []  # nobody waits for these, but they need their memory
        self._sent_after = -1  # steps
        optimizer.core.engine.join_replicas(weakly(self.tell))

    def start(self) -> None:
        """Read the last gather, and start the next, with each backward pass. Raises as `read`."""
        self.read()
        self._pending = self._start_gather(None)
        if not is_asynchronous(self._across.device):
            self._read_failures()

    def tell(self, error: BaseException) -> None:
        """Send other replicas the error that all ranks of this one raise of a step, once. No wait."""
        if self._sent_after != self._optimizer.num_steps:
            self._sent_after = self._optimizer.num_steps
            self._sent.append(self._start_gather(error))

    def _start_gather(self, error: BaseException | None) -> _Gather:
        values, num_steps, text = self._values, self._optimizer.num_steps, "step()"
        values.follow(self._optimizer.param_groups, ())
        if error is not None:
            is_remote = isinstance(error, RemoteRankError)
            name = f"rank {self._across.numbers[self._across.rank]} failed with {type(error).__name__}"
            text = message_of(error) if is_remote else f"{name}: {error}"
        stamp = Stamp(0, error is not None, num_steps % 2**32, values.digest, text.encode())
        mine = stamp.packed(STAMP_NBYTES + 192)  # with an excerpt of the error
        row = to_device(bytes_to_tensor(mine), self._across.device)
        group = self._across  # the function below is kept: it must not keep this object

        def stamps(gathered: list[Tensor]) -> dict[int, Stamp]:
            return Arrival(gathered[0], mine).read_stamps(group.read)

        return values.by_group, Pending([group.start_all_gather(row, "the options of replicas")], stamps)

    def _read_failures(self) -> dict[int, Stamp]:
        assert self._pending is not None  # checked by the caller
        stamps = self._pending[1].wait()
        failed = {replica: stamp for replica, stamp in stamps.items() if stamp.has_failed}
        if 0 < len(failed) < len(stamps):  # else each has raised its own
            self._pending, (replica, stamp) = None, next(iter(failed.items()))
            text = f"a step has failed in replica {replica} of the mesh: {stamp.name}"
            if len(failed) > 1:
                text = f"{len(failed)} replicas of the mesh have failed in a step; their own output has more"
            raise RemoteRankError(
                f"{text}. Parameters of replicas may differ by now: load a checkpoint on all"
            )
        return stamps

    def read(self) -> None:
        """Wait for the pending gather; RankMismatchError or RemoteRankError if replicas differ or failed."""
        if self._pending is None:
            return
        mine, stamps = self._pending[0], self._read_failures()
        self._pending, parts = None, parted(stamps, "number")
        steps = (f"{stamp.number} of {ranks_text(replicas, 'replica')}" for replicas, stamp in parts)
        wrong = [f"steps taken: {', '.join(steps)}"] if parts else []
        if len({stamp.digest for stamp in stamps.values()}) > 1:
            options = self._across.all_gather_json(mine)

            def each(replicas: Sequence[int], value: str) -> str:
                return f"{value} in {ranks_text(replicas, 'replica')}"

            wrong += options_text(options, differing(options), each, ", ")
        if wrong:
            raise RankMismatchError(
                f"the replicas of the mesh differ: {shortened(wrong)}. Parameters may differ by now: load a "
                "checkpoint on all. Take the same steps on all, and run schedulers alike"
            )


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

        self._buckets: list[OwnerBucket] = []
        for number, indices in enumerate(index_lists):
            schedule = engine.buckets_of([params[indices[0]]])[0].schedule  # of the one with all of them
            place, is_last = (reduced, self.options, number), number == len(index_lists) - 1
            slots = sorted(indices, reverse=True)
            self._buckets.append(
                OwnerBucket(slots, *place, is_last=is_last, schedule=schedule, owners=owners)
            )
        return BucketAssignment.of(self.names, self._buckets)

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
        sums = OwnerSums(self._buckets, self._summing, *self._route)
        for bucket in self._buckets:
            earlier = {}
            for slot, (index, param) in enumerate(zip(bucket.indices, bucket.params, strict=True)):
                if param.grad is not None and not self.unreduced[index]:
                    earlier[slot], param.grad = param.grad, None
            bucket.begin(earlier, adds_at_once=self.defers_reports)
        return sums.launch

    def _finish(self, current: BackwardPass) -> None:
        super()._finish(current)
        if self._check is not None and not self.defers_reports:
            self._check.read()
