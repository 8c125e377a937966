"""Where buckets wait to be stepped: in front of a thread, or for the hook of the next bucket.

Note [A thread or none]
    Where a collective runs on the CPU and each process group has threads of its own, as on gloo, a thread
    takes one bucket after the other: it waits for the reduction, steps, and starts the gather on process
    groups of its own. So the backward pass goes on meanwhile.

    Two threads must not use communicators of NCCL at the same time: each rank's GPU runs their kernels in the
    order in which they come, which may differ between ranks, and then two of them wait for each other. An
    accelerator needs no thread either. To wait there is to let a stream wait; the CPU goes on. So there the
    hook itself does everything, on a stream beside that of the backward pass: it starts its bucket's
    reduction, then steps the bucket before and starts its gather, on the process group of the optimizer. The
    order on every rank is: reduce 0, reduce 1, gather 0, reduce 2, gather 1, and so on. The last bucket is
    stepped in its own hook.

    gloo with tensors on an accelerator also goes without a thread. It waits on the CPU, so there the backward
    pass is held up until a bucket is reduced: right, and slow, as gloo is there. `Overlap.takes_thread`
    decides.

Note [Streams of a step]
    B is the stream of the backward pass, on which hooks are called; S the stream beside it; N that of the
    collectives; C the caller's, which the engine makes wait for B before the callbacks at the end. Memory
    goes back to the stream that it was taken from.

    ==========================  =====  ================  ==================================================
    tensor                      made   used              ordered or kept by
    ==========================  =====  ================  ==================================================
    bucket, owners' parcels     B      N, S              S waits for the reduction; `record_use` on S
    reduced by a hook           B, N   S, C (DDP)        likewise; ``done`` is set on S, and DDP waits for it
    parameters, read            C      B, S              S waits in each hook for what B was given before
    parameters, written         S, N   C (next forward)  C waits for S when backward ends, and for the gather
    moved into their bucket     B      S, N, C           the first hook does it, on B, and S waits for B
    optimizer's state           S      S, C (step())     C waits for S when backward ends; S for B in hooks
    flat tensor of a gather     S      N, C              `Pending` marks it on each stream that waits first
    what steps take and drop    S      S                 nothing else uses it
    late gradients              C      C                 stepped when C has waited for S
    ==========================  =====  ================  ==================================================

    ``param.grad`` is not used on S: a step reads the bucket that was reduced. C waits for S before
    anybody can zero or change the bucket through it.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from zero_optim.compat.streams import StreamBeside, recorded_event, wait_for_event
from zero_optim.hooks.overlap.steps import BucketSteps
from zero_optim.hooks.overlap.task import BackwardPass, Task
from zero_optim.step.overlap import Overlap


class Line(Protocol):
    """Buckets in line, stepped one after the other."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Put buckets of one pass in line, in their order. What fails is a failure of the pass."""
        ...

    def end(self, of: BackwardPass) -> None:
        """See to what a pass has in line when no more buckets come. `Overlap.wait_for_steps` follows."""
        ...


def line_of(steps: BucketSteps, overlap: Overlap) -> Line:
    """Make a line, see Note [A thread or none]. Does not communicate."""
    return ThreadLine(steps, overlap) if overlap.takes_thread else InlineLine(steps, overlap)


_END_TIMEOUT = 10.0  # seconds
_Queue: TypeAlias = "queue.SimpleQueue[tuple[BucketSteps, Task] | None]"


class ThreadLine:
    """A line in front of a thread, which ends when this object goes.

    Args:
        steps: what is done with each bucket.
        overlap: is told of the buckets.
    """

    def __init__(self, steps: BucketSteps, overlap: Overlap) -> None:
        self._steps = steps
        self._overlap = overlap
        self._queue: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._queue,), name="zero_step", daemon=True)
        thread.start()
        weakref.finalize(self, _end_thread, self._queue, thread)

    def put(self, tasks: Sequence[Task]) -> None:
        """See `Line`."""
        for task in tasks:
            self._overlap.announce(task.done.wait)
            self._queue.put((self._steps, task))

    def end(self, of: BackwardPass) -> None:
        """Do nothing: the thread takes what is in line."""


def _end_thread(line: "_Queue", thread: threading.Thread) -> None:
    """End the thread and wait for it, also when the process ends.

    An interpreter that ends while a thread is inside PyTorch aborts the process. A line that goes at another
    time goes between two passes, when its thread is idle. The wait has a limit: another rank may be gone.
    """
    line.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_TIMEOUT)


def _work(line: "_Queue") -> None:
    """Run the thread: nothing but what stands in line keeps its steps, so that they can go.

    Whatever fails, the bucket's future is completed and the thread lives on. Otherwise backward would wait
    for ever.
    """
    while (found := line.get()) is not None:
        steps, task = found
        result = task.buffer
        try:
            with torch.no_grad():
                result, gradients = steps.receive(task)
                steps.step(task, gradients)
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            task.of.error = task.of.error or error
        task.complete(result)
        gradients = None
        del found, steps, task, result, gradients


class InlineLine:
    """A line without a thread: the hook of each bucket steps the one before.

    A bucket's future is complete when its own hook returns, so that DDP need not wait for a later hook, which
    may not come. On an accelerator that is when the reduction has been queued for.

    Args:
        steps: what is done with each bucket.
        overlap: is told of the stream on which that happens.
    """

    def __init__(self, steps: BucketSteps, overlap: Overlap) -> None:
        self._steps = steps
        self._overlap = overlap
        self._streams = StreamBeside()

    def put(self, tasks: Sequence[Task]) -> None:
        """See `Line`."""
        for task in tasks:
            self._overlap.announce(self._streams.join)
            self._step_received(task.of)
            self._receive(task)
        if tasks and tasks[-1].of.is_complete:
            self._step_received(tasks[-1].of)

    def end(self, of: BackwardPass) -> None:
        """Step what is left where the last bucket was not reduced, as DDP may leave out unused ones."""
        self._step_received(of)

    def _receive(self, task: Task) -> None:
        result, gradients, device = task.buffer, None, task.buffer.device
        here = recorded_event(device)
        with task.of.minding(), torch.no_grad(), self._streams.using(device):
            wait_for_event(device, here)
            result, gradients = self._steps.receive(task)
            task.complete(result)  # on this stream, which waits for the reduction
        if not task.done.done():
            task.complete(result)
        task.of.received.append((task, gradients))

    def _step_received(self, of: BackwardPass) -> None:
        for task, gradients in of.pop_received():
            with of.minding(), torch.no_grad(), self._streams.using(task.buffer.device):
                self._steps.step(task, gradients)
