"""What `zero_step` does with a bucket: reduce, step, gather, while the backward pass runs.

Note [Who does what]
    The backward pass calls the hook when a bucket is full. The hook launches the reduction and puts the
    bucket in line (`line`), where a thread, or the hook of the next bucket, waits for the reduction, steps
    what this rank owns of it, and launches the gather. So the order of collectives is that of the buckets on
    every rank, whatever the timing. The first hook begins the step, where the backward pass calls it: what
    the user did to parameters is taken over while nothing reads them elsewhere. DDP waits for the bucket's
    future when backward ends; a callback behind DDP's sees to the rest.

Note [Failures]
    What fails in line comes out of ``backward()``, when DDP has ended it in good order. Until then the
    rank takes part in every gather without stepping anything more, as the others wait for it.

Note [Backward passes within backward passes]
    Reentrant checkpointing runs one for each segment, and the last bucket may become full in such a
    one. Whether DDP has handed the gradients out when that one ends depends on whose DDP it is. So late
    parameters are left to ``step()`` then, and gradients changed too late are not noticed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_optim.comm.started import Work
from zero_optim.compat.engine import after_backward, backward_number, in_backward, in_outer_backward
from zero_optim.compat.streams import future_on
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture
from zero_optim.hooks.overlap.line import line_of
from zero_optim.hooks.overlap.owners import BucketsToOwners, OwnerReduction
from zero_optim.hooks.overlap.steps import BucketSteps
from zero_optim.hooks.overlap.task import SteppedPass, Task
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.step.overlap import Overlap, StepPart


class Stepper:
    """Takes buckets, has them stepped, and sees to the end of the backward pass.

    Args:
        optimizer: whose step.
        hook: what reduces.
        interleave: whether buckets get in line as they come; otherwise all together with the last.
        to_owners: reduce to owners, in the place of ``hook``. Then all ranks construct it, which may take
            process groups.
        all_used: whether some rank is known to use every parameter of the wrapper, the same on every rank;
            asked for each bucket.
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
        self._plans: dict[int, StepPart] = {}
        self._pass: SteppedPass | None = None
        self._line = line_of(BucketSteps(optimizer, self._overlap), self._overlap)

    def take(self, state: object, bucket: GradBucket) -> TensorFuture:
        """Launch a bucket's reduction and put it in line."""
        number, joined = bucket.index(), not in_backward()
        of = self._pass
        if of is None or number <= of.number:  # the pass before may have broken off
            self._overlap.check_attached()
            of = self._pass = SteppedPass(joined, _abandoning(self._overlap, self._to_owners))
        of.number, of.is_complete = number, bucket.is_last()
        if not joined and backward_number() not in of.asked:
            of.asked.add(backward_number())
            after_backward(self._before_end)
        part, buffer = self._plan(number, bucket.parameters()), bucket.buffer()
        all_used = getattr(bucket, "all_used", False) or self._all_used()
        reduced = self._launched(state, bucket, joined, all_used)
        if buffer.is_sparse:
            # On this thread: to try a class is no work for a thread beside the backward pass, which may draw
            # random numbers. Every rank sees the same buckets, so all fail.
            with of.minding():
                self._optimizer.steps.check_sparse(part.params)
        done = future_on(buffer.device)
        of.held.append(Task(of, part, buffer, reduced, all_used, done))
        if self._interleave or of.is_complete:
            self._release(of)
        if joined and of.is_complete:  # there is no backward pass to end
            self._end_joined(of)
        return done

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

    def _plan(self, number: int, params: Sequence[Tensor]) -> StepPart:
        """Plan a bucket, unless it is the one that was planned: buckets change when DDP makes them anew."""
        known = self._plans.get(number)
        if known is None or not self._overlap.is_current(known, params):
            known = self._plans[number] = self._overlap.part(params)
        return known

    def _release(self, of: SteppedPass) -> None:
        """Put in line what was held."""
        if not of.has_begun:
            self._begin(of)
        tasks = of.pop_held()
        for task in tasks:
            # From here on any moment may change them. Autograd has to refuse to read old values, and on this
            # thread it does so whatever the timing.
            torch.autograd.graph.increment_version(task.part.params)
        self._line.put(tasks)

    def _begin(self, of: SteppedPass) -> None:
        """Begin the step, on this thread: see Note [Moving parameters] in `zero_optim.shard.storage`."""
        of.has_begun = True
        with of.minding(), torch.no_grad():
            self._overlap.wait_for_steps()  # of a pass that broke off
            self._optimizer.steps.begin_overlapped(joined=of.joined)
        if of.error is not None:  # perhaps before that was done: a gather would, on another thread or stream
            with of.minding():
                self._overlap.take_over()

    # ------------------------------------------------------------------ at the end of the backward pass

    def _before_end(self) -> None:
        """See to it that `_end` comes behind the callback that DDP has queued by now.

        A wait for the thread is done here, where it is counted: DDP would wait next, and PyTorch's does not
        tell how long.
        """
        after_backward(self._end)
        of = self._pass
        if self._overlap.takes_thread and of is not None and (of.is_complete or not in_outer_backward()):
            self._overlap.wait_for_steps()

    def _end(self) -> None:
        """Step what is late, now that DDP has handed the gradients out, and raise what has failed."""
        of, is_inner = self._pass, in_outer_backward()
        if of is None or (is_inner and not of.is_complete):
            return  # the end has been seen to already, or more is to come
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
        try:
            if not is_inner:
                self._step_late(of, [param.grad for param in of.late])
            if self._to_owners is not None:
                self._overlap.drop_gradients()
        finally:
            self._overlap.end_backward(is_final=not is_inner, failed=of.error is not None)

    def _end_joined(self, of: SteppedPass) -> None:
        """Take part in the same gathers."""
        self._pass = None
        self._overlap.wait_for_steps()
        self._step_late(of, [None] * len(of.late))
        if of.error is not None:
            raise of.error

    def _step_late(self, of: SteppedPass, gradients: Sequence[Tensor | None]) -> None:
        """Step what is late, unless ``step()`` will: under ``Join`` it lends owners the gradients."""
        late, current = of.pop_late(), self._overlap.current
        if late and current is not None and not current.lends:
            known = gradients if of.error is None else [None] * len(late)
            self._overlap.step(self._optimizer.param_groups, self._overlap.part(late), known, of.error)


def _abandoning(overlap: Overlap, to_owners: BucketsToOwners | None) -> Callable[[], None]:
    """Make what sees to it that no later user gets process groups on which something failed.

    It holds nothing else, as a thread may hold it longest.
    """
    leases = [overlap.lanes] if to_owners is None else [overlap.lanes, to_owners.lanes]

    def abandon() -> None:
        for lease in leases:
            lease.abandon()

    return abandon
