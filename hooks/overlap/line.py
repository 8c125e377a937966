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

    gloo with tensors on an accelerator, and other backends of the CPU, also go without a thread. They wait on
    the CPU, so there the backward pass is held up until a bucket is reduced: right, and slow.
    `Overlap.takes_thread` decides.

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

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from zero_optim.compat.streams import StreamBeside, recorded_event, wait_for_event
from zero_optim.hooks.overlap.steps import BucketSteps
from zero_optim.hooks.overlap.task import Task
from zero_optim.step.overlap import Overlap


class Line(Protocol):
    """Buckets in line, stepped one after the other."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Put buckets of one pass in line, in their order. What fails is a failure of the pass.

        `Overlap.wait_for_steps` sees to what is still in line when no more buckets come.
        """
        ...


def line_of(steps: BucketSteps, overlap: Overlap) -> Line:
    """Make a line, see Note [A thread or none]. Does not communicate."""
    return ThreadLine(steps, overlap) if overlap.takes_thread else InlineLine(steps, overlap)


_END_TIMEOUT = 10.0  # seconds
_Queue: TypeAlias = "queue.SimpleQueue[tuple[BucketSteps, Task] | None]"

# Threads that step, and the line in front of each. Global as the end of the process is: all of them are
# waited for then, those too whose line is gone. It is weak: a thread is out of it when it has ended.
_THREADS: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()


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
        _THREADS[thread] = self._queue
        # Does not wait for the thread, which may wait for another rank: this runs wherever the object goes.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def put(self, tasks: Sequence[Task]) -> None:
        """See `Line`."""
        for task in tasks:
            self._overlap.announce(task.done.wait)
            self._queue.put((self._steps, task))


@atexit.register
def _end_threads() -> None:
    """End all threads, and wait for them, when the process ends.

    An interpreter that ends while a thread is inside PyTorch aborts the process. The wait has a limit, one
    for all: another rank may be gone.
    """
    threads = list(_THREADS.items())
    for _, line in threads:
        line.put(None)
    deadline = time.monotonic() + _END_TIMEOUT
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


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
    may not come. With NCCL the hook does not wait for the reduction: its stream does.

    Args:
        steps: what is done with each bucket.
        overlap: is told of the stream on which that happens.
    """

    def __init__(self, steps: BucketSteps, overlap: Overlap) -> None:
        self._steps = steps
        self._overlap = overlap
        self._streams = StreamBeside()
        self._received: list[tuple[Task, Sequence[Tensor] | None]] = []  # reduced, not stepped; gradients

    def put(self, tasks: Sequence[Task]) -> None:
        """See `Line`."""
        for task in tasks:
            self._overlap.announce(self._finish)
            self._step_received()
            self._receive(task)
        if tasks and tasks[-1].of.is_complete:
            self._step_received()

    def _finish(self) -> None:
        """Step what is left, and let the current stream wait for all.

        Something is left where the pass broke off, or the last bucket was not reduced, as DDP may leave out
        unused ones.
        """
        for device in {task.buffer.device for task, _ in self._received}:
            here = recorded_event(device)
            with self._streams.using(device):
                wait_for_event(device, here)
        self._step_received()
        self._streams.join()

    def _receive(self, task: Task) -> None:
        result, gradients, device = task.buffer, None, task.buffer.device
        here = recorded_event(device)
        with task.of.minding(), torch.no_grad(), self._streams.using(device):
            wait_for_event(device, here)
            result, gradients = self._steps.receive(task)
            task.complete(result)  # on this stream, which waits for the reduction
        if not task.done.done():
            task.complete(result)
        self._received.append((task, gradients))

    def _step_received(self) -> None:
        received, self._received = self._received, []
        for task, gradients in received:
            with task.of.minding(), torch.no_grad(), self._streams.using(task.buffer.device):
                self._steps.step(task, gradients)
