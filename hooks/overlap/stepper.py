"""The overlapped step of a bucket: reduce, step, gather during the backward pass.

Note [Who does what]
    The hook of a full bucket starts the reduction and queues the bucket (`line`). A thread, or the next hook,
    waits for it, then steps and gathers the optimizer's full buckets. Collectives have one order on every
    rank. The first hook begins the step and takes over the user's changes, while nothing else reads
    parameters. DDP waits for the futures at the end of backward; a callback behind DDP's does the rest.

Note [Backward passes within backward passes]
    Reentrant checkpointing runs one for each segment, in which the last bucket may become full. Whether DDP
    has assigned gradients by then depends on the DDP. So ``step()`` handles all-zero gradients, and late
    changes of gradients are not noticed.
"""

from collections.abc import Callable

import torch

from zero_optim.comm.works import Work
from zero_optim.compat.engine import after_backward, backward_number, in_backward, in_outer_backward
from zero_optim.compat.streams import future_on
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture
from zero_optim.hooks.overlap.line import line_of
from zero_optim.hooks.overlap.owners import BucketsToOwners, OwnerReduction
from zero_optim.hooks.overlap.passes import SteppedPass, Task
from zero_optim.optimizer import ZeroRedundancyOptimizer


class Stepper:
    """Queues DDP's buckets for the step, and ends it with the backward pass.

    ``to_owners`` replaces ``hook``; all ranks then construct this, which may create process groups.
    ``all_used`` is called for each bucket, with the same result on all ranks.
    """

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        hook: Hook,
        *,
        interleave: bool,
        to_owners: bool,
        all_used: Callable[[], bool],
    ) -> None:
        self._optimizer = optimizer
        self._overlap = optimizer.steps.overlap()
        self._to_owners: BucketsToOwners | None = None
        if to_owners:
            self._to_owners = BucketsToOwners(self._overlap.new_lanes(), self._overlap.pieces)
        self._hook = hook
        self._interleave = interleave
        self._all_used = all_used
        self._pass: SteppedPass | None = None
        self._held: list[Task] = []  # came, and are not in line yet
        self._asked: set[int] = set()  # the engine's numbers of the passes that will call `_end`
        self._line = line_of(self._overlap)

    def take(self, state: object, bucket: GradBucket) -> TensorFuture:
        """Start a bucket's reduction and queue it."""
        number, joined, params = bucket.index(), not in_backward(), bucket.parameters()
        of = self._pass
        if of is None or number <= of.number:  # the pass before may have broken off
            of = self._new_pass(joined)
        of.number, of.is_complete = number, bucket.is_last()
        if not joined and backward_number() not in self._asked:
            self._asked.add(backward_number())
            after_backward(self._before_end)
        buffer = bucket.buffer()
        all_used = getattr(bucket, "all_used", False) or self._all_used()
        reduced = self._launched(state, bucket, joined, all_used)
        if buffer.is_sparse:
            # On this thread: to try a class is no work for a thread beside the backward pass, which may draw
            # random numbers. Every rank sees the same buckets, so all fail.
            with of.minding():
                self._optimizer.core.check_sparse(params)
        done = future_on(buffer.device)
        self._held.append(Task(of, params, buffer, reduced, all_used, done))
        if self._interleave or of.is_complete:
            self._release(of)
        if joined and of.is_complete:  # there is no backward pass to end
            self._end_joined(of)
        return done

    def _new_pass(self, joined: bool) -> SteppedPass:
        self._overlap.check_attached()
        self._held, self._asked = [], set()
        lanes = (
            [self._overlap.lanes] if self._to_owners is None else [self._overlap.lanes, self._to_owners.lanes]
        )
        self._pass = SteppedPass(self._optimizer, self._overlap, lanes, joined)
        return self._pass

    def _launched(
        self, state: object, bucket: GradBucket, joined: bool, all_used: bool
    ) -> Work | OwnerReduction:
        ranks = self._overlap.reducing()
        if self._to_owners is not None:
            ownership = self._to_owners.plan(bucket, ranks.size)
            return self._to_owners.launch(ranks, bucket, ownership, joined=joined, all_used=all_used)
        # A record, so that the watchdog sees who waits for the hook: PyTorch's DDP makes none.
        watched = ranks.during("reduce", is_exposed=False)
        record = watched.begin_work(f"bucket {bucket.index()}")
        record.runs_hook = True
        with record.starting():
            reduced = self._hook(state, bucket)
        if self._hook is mean_hook:  # what other hooks send is not known
            ranks.count_sum(bucket.buffer())
        return Work(reduced, watched.phase, record)

    def _release(self, of: SteppedPass) -> None:
        """Queue the held buckets."""
        if not of.has_begun:
            self._begin(of)
        tasks, self._held = self._held, []
        for task in tasks:
            # From here on any moment may change them. Autograd has to refuse to read old values, and on this
            # thread it does so whatever the timing.
            known = [param for param in task.params if self._overlap.bucket_of(param) is not None]
            torch.autograd.graph.increment_version(known)
        self._line.put(tasks)

    def _begin(self, of: SteppedPass) -> None:
        """Begin the step on this thread: Note [Moving parameters] in `zero_optim.shard.storage`."""
        of.has_begun = True
        with of.minding(), torch.no_grad():
            self._overlap.wait_for_steps()  # of a pass that broke off
            self._optimizer.begin_overlapped_step(joined=of.joined)
        if of.error is not None:  # perhaps before that was done: a gather would, on another thread or stream
            with of.minding():
                self._overlap.take_over()

    # ------------------------------------------------------------------ at the end of the backward pass

    def _before_end(self) -> None:
        """Queue `_end` behind DDP's callback.

        Waiting for the thread here measures the wait, which PyTorch's DDP would not.
        """
        after_backward(self._end)
        of = self._pass
        if self._overlap.takes_thread and of is not None and (of.is_complete or not in_outer_backward()):
            self._overlap.wait_for_steps()

    def _end(self) -> None:
        """Step late buckets after DDP has assigned the gradients; raise what failed."""
        of, is_inner = self._pass, in_outer_backward()
        if of is None or (is_inner and not of.is_complete):
            return  # it has ended already, or more is to come
        self._pass = None
        try:
            self._overlap.wait_for_steps()
            if self._overlap.current is not None:  # None: the step could not even begin
                self._end_step(of, is_inner)
        except BaseException:
            of.abandon()
            raise
        if of.error is not None:
            raise of.error

    def _end_step(self, of: SteppedPass, is_inner: bool) -> None:
        current = self._overlap.current
        assert current is not None  # asked by the caller
        try:
            of.step_late(leaves_unsure=is_inner or current.lends, has_grads=True)
            if self._to_owners is not None:
                self._overlap.drop_gradients()
        finally:
            self._overlap.end_backward(is_final=not is_inner, failed=of.error is not None)

    def _end_joined(self, of: SteppedPass) -> None:
        """Take part in the same gathers."""
        self._pass = None
        self._overlap.wait_for_steps()
        current = self._overlap.current
        lends = current is None or current.lends  # step() lends owners the gradients
        of.step_late(leaves_unsure=lends, has_grads=False)
        if of.error is not None:
            raise of.error
