"""What `zero_step` does with a bucket: reduce, step, gather, in the line of a thread of its own.

Note [Who does what]
    The backward pass calls the hook when a bucket is full. The hook launches the reduction and puts the
    bucket in the line of a thread of its own, which takes one after the other: waits for the reduction, steps
    what this rank owns of it, launches the gather. So the order of collectives is that of the buckets on
    every rank, whatever the timing, and gathers have process groups of their own. DDP waits for the bucket's
    future when backward ends; a callback behind DDP's sees to the rest.

Note [Gradients that are all zero]
    A bucket does not tell which parameters were used: unused ones are zeros in it. An optimizer leaves a
    parameter without a gradient alone, but not one with a gradient of zeros. So parameters whose reduced
    gradient is all zeros, which every rank sees alike, are late: they are stepped when backward has ended, as
    ``param.grad`` says by then which it was.

Note [Failures]
    What fails on the thread comes out of ``backward()``, when DDP has ended it in good order. Until then the
    rank takes part in every gather without stepping anything more, as the others wait for it.

Note [Backward passes within backward passes]
    Reentrant checkpointing runs one for each segment, and the last bucket may become full in such a
    one. Whether DDP has handed the gradients out when that one ends depends on whose DDP it is. So late
    parameters are left to ``step()`` then, and gradients changed too late are not noticed.
"""

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zero_optim.comm.lanes import Lease
from zero_optim.compat.engine import after_backward, backward_number, in_backward, in_outer_backward
from zero_optim.compat.streams import StreamBeside, future_on
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture
from zero_optim.hooks.overlap.owners import BucketOwnership, OwnerReduction
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.memory import consecutive_views
from zero_optim.step.overlap import StepPart


@dataclass(slots=True, eq=False)
class _BackwardPass:
    """What is known of one backward pass: made by its first bucket, dropped when it has ended.

    Attributes:
        is_complete: its last bucket has come.
        number: of the bucket that came last.
        held: buckets that have come and are not in line yet.
        asked: the engine's numbers of the passes that will call `Stepper._end`.
        late: parameters to step when it has ended; see Note [Gradients that are all zero].
        error: what failed first; see Note [Failures].
    """

    is_complete: bool = False
    number: int = -1
    held: list["_Task"] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    late: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None

    def pop_late(self) -> list[Tensor]:
        """Give the late parameters, once."""
        late, self.late = self.late, []
        return late


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A bucket in line.

    Attributes:
        of: the pass that it belongs to.
        begins: it is the first one of its pass.
        joined: this rank has no backward pass for it, and only takes part: it ran out of inputs, or the pass
            broke off.
        part: its parameters.
        buffer: its gradients as they were given to the reduction.
        reduced: its reduction.
        done: given to DDP; has the reduced gradients when the bucket was stepped.
    """

    of: _BackwardPass
    begins: bool
    joined: bool
    part: StepPart
    buffer: Tensor
    reduced: TensorFuture | OwnerReduction
    done: TensorFuture


_END_TIMEOUT = 10.0  # seconds
_Line: TypeAlias = "queue.SimpleQueue[tuple[Stepper, _Task] | None]"


class Stepper:
    """Takes buckets, steps them on a thread of its own, and sees to the end of the backward pass.

    Args:
        optimizer: whose step.
        hook: what reduces.
        interleave: whether buckets get in line as they come; otherwise all together with the last.
        owner_lanes: lanes for reducing to owners; None if ``hook`` reduces.
    """

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, hook: Hook, interleave: bool, owner_lanes: Lease | None
    ) -> None:
        self._optimizer = optimizer
        self._overlap = optimizer.overlap()
        self._owner_lanes = owner_lanes
        self._hook = hook
        self._interleave = interleave
        self._plans: dict[int, tuple[StepPart, BucketOwnership | None]] = {}
        self._pass: _BackwardPass | None = None
        self._line: _Line = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._line,), name="zero_step", daemon=True)
        thread.start()
        weakref.finalize(self, _end_thread, self._line, thread)

    def take(self, state: object, bucket: GradBucket) -> TensorFuture:
        """Launch a bucket's reduction and put it in line."""
        number, joined = bucket.index(), not in_backward()
        begins = self._pass is None or number <= self._pass.number  # the pass before may have broken off
        if self._pass is None or begins:
            self._pass = _BackwardPass()
        of = self._pass
        of.number, of.is_complete = number, bucket.is_last()
        if not joined and backward_number() not in of.asked:
            of.asked.add(backward_number())
            # Behind the callback that DDP has queued by then.
            after_backward(lambda: after_backward(self._end))
        part, ownership = self._plan(number, bucket.parameters())
        buffer = bucket.buffer()
        reduced: TensorFuture | OwnerReduction
        if ownership is None or self._owner_lanes is None:
            reduced = self._hook(state, bucket)
        else:
            reduced = OwnerReduction(self._overlap.group, self._owner_lanes.groups, bucket, ownership, joined)
        done = future_on(buffer.device)
        of.held.append(_Task(of, begins, joined, part, buffer, reduced, done))
        if self._interleave or of.is_complete:
            self._release(of)
        if joined and of.is_complete:  # there is no backward pass to end
            self._end_joined(of)
        return done

    def _plan(self, number: int, params: Sequence[Tensor]) -> tuple[StepPart, BucketOwnership | None]:
        """Plan a bucket, unless it is the one that was planned: buckets change when DDP makes them anew."""
        known = self._plans.get(number)
        overlap = self._overlap
        if known is None or not overlap.is_current(known[0], params):
            ownership = None
            if self._owner_lanes is not None:
                ownership = BucketOwnership.of(params, overlap.owners(params), overlap.group.size)
            known = self._plans[number] = overlap.part(params), ownership
        return known

    def _release(self, of: _BackwardPass) -> None:
        """Put in line what was held."""
        held, of.held = of.held, []
        for task in held:
            # From here on any moment may change them. Autograd has to refuse to read old values, and on this
            # thread it does so whatever the timing.
            torch.autograd.graph.increment_version(task.part.params)
            self._overlap.announce(task.done)
            self._line.put((self, task))

    # ------------------------------------------------------------------ on the thread

    def work(self, task: _Task) -> None:
        """Wait for a reduction, step the bucket, launch its gather."""
        result, gradients = task.buffer, None
        with self._minding(task.of):
            if task.begins:
                self._optimizer.begin_overlapped_step(joined=task.joined)
            reduced = _tensor(task.reduced.wait())
            gradients = _gradients(reduced, task.part.given)
            result = reduced
        with self._minding(task.of):
            self._step(task, gradients)
        task.done.set_result(result)

    @contextmanager
    def _minding(self, of: _BackwardPass) -> Iterator[None]:
        """Keep the first exception, to be raised when backward has ended."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            self._abandon_lanes()
            if of.error is None:
                of.error = error

    def _abandon_lanes(self) -> None:
        """See to it that no later optimizer gets process groups on which something failed."""
        self._overlap.lanes.abandon()
        if self._owner_lanes is not None:
            self._owner_lanes.abandon()

    def _step(self, task: _Task, gradients: Sequence[Tensor] | None) -> None:
        part, known = task.part, self._known(task, gradients)
        if gradients is not None and not isinstance(task.reduced, OwnerReduction):
            zeros = _all_zero(gradients)
            if zeros:
                task.of.late += [part.given[place] for place in zeros]
                places = [place for place in range(len(part.given)) if place not in zeros]
                part = self._overlap.part([part.given[place] for place in places])
                known = [known[place] for place in places]
        self._overlap.step(self._optimizer.param_groups, part, known)

    def _known(self, task: _Task, gradients: Sequence[Tensor] | None) -> list[Tensor | None]:
        """Tell what each parameter of a bucket is to be stepped with; None leaves it alone."""
        if gradients is None or task.of.error is not None:
            return [None] * len(task.part.given)
        if isinstance(task.reduced, OwnerReduction):
            used = task.reduced.used()
            return [gradient if place in used else None for place, gradient in enumerate(gradients)]
        return list(gradients)

    # ------------------------------------------------------------------ at the end of the backward pass

    def _end(self) -> None:
        """Step what is late, now that DDP has handed the gradients out, and raise what has failed."""
        of, is_inner = self._pass, in_outer_backward()
        if of is None or (is_inner and not of.is_complete):
            return  # the end has been seen to already, or more is to come
        self._pass = None
        try:
            self._overlap.wait_for_steps()
            try:
                if not is_inner:
                    self._step_late(of, [param.grad for param in of.late])
                if self._owner_lanes is not None:
                    self._overlap.drop_gradients()
            finally:
                self._overlap.end_backward(is_final=not is_inner, failed=of.error is not None)
        except BaseException:
            self._abandon_lanes()
            raise
        if of.error is not None:
            raise of.error

    def _end_joined(self, of: _BackwardPass) -> None:
        """Take part in the same gathers."""
        self._pass = None
        self._overlap.wait_for_steps()
        self._step_late(of, [None] * len(of.late))
        if of.error is not None:
            raise of.error

    def _step_late(self, of: _BackwardPass, gradients: Sequence[Tensor | None]) -> None:
        """Step what is late, unless ``step()`` will: under ``Join`` it lends owners the gradients."""
        late, current = of.pop_late(), self._overlap.current
        if late and current is not None and not current.lends:
            known = gradients if of.error is None else [None] * len(late)
            self._overlap.step(self._optimizer.param_groups, self._overlap.part(late), known)


def _work(line: "_Line") -> None:
    """Run the thread: nothing but what stands in line keeps a stepper, and the thread ends with it."""
    streams = StreamBeside()  # so that steps do not queue behind the backward pass
    while (found := line.get()) is not None:
        stepper, task = found
        with torch.no_grad(), streams.using(task.buffer.device):
            stepper.work(task)
        del found, stepper, task


def _end_thread(line: "_Line", thread: threading.Thread) -> None:
    """End the thread and wait for it, also when the process ends.

    An interpreter that ends while a thread is inside PyTorch aborts the process. At other times the thread is
    idle, as what stands in line keeps the stepper. It does not wait for ever: another rank may be gone.
    """
    line.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_TIMEOUT)


def _tensor(value: Any) -> Tensor:  # noqa: ANN401 - whatever a hook's future holds
    tensor = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected the hook's future to hold one tensor, got {type(tensor).__name__}")
    return tensor


def _gradients(result: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View each parameter's gradient in a bucket's reduced tensor, with the parameter's strides."""
    if result.is_sparse:
        return [result.to(params[0].dtype)]
    return consecutive_views(result.reshape(-1).to(params[0].dtype), params)


def _all_zero(gradients: Sequence[Tensor]) -> set[int]:
    """Find the gradients without a nonzero element; on the GPU that waits for them.

    Looks at first elements, all at once, and at the whole only of those whose first is zero.
    """
    if gradients[0].is_sparse:
        return set() if gradients[0]._nnz() else {0}
    filled = [place for place, gradient in enumerate(gradients) if gradient.numel()]
    if not filled:
        return set()
    first = gradients[filled[0]]
    starts = [int(gradients[place].storage_offset() - first.storage_offset()) for place in filled]
    flat = first.as_strided((starts[-1] + 1,), (1,))
    index = torch.tensor(starts, device=flat.device)
    suspects = (flat[index] == 0).nonzero().flatten().tolist()
    return {filled[suspect] for suspect in suspects if not gradients[filled[suspect]].any()}
