"""The queue of buckets to be stepped, by a thread or by the next bucket's hook.

Note [A thread or none]
    On gloo, whose groups have own threads, a thread waits for each reduction, steps, and gathers on its own
    groups beside the backward pass. With NCCL two threads could issue kernels in another order on another
    rank, and deadlock. An accelerator needs no thread: each hook starts its reduction, then steps and gathers
    the bucket before on a side stream and the optimizer's group (reduce 0, reduce 1, gather 0, reduce 2,
    gather 1, …). gloo with accelerator tensors, and other CPU backends, have no thread either, and delay the
    backward pass. `Overlap.takes_thread` decides.

Note [Streams of a step]
    B is the backward stream, which calls hooks; S the side stream; N that of collectives; C the caller's,
    which the engine makes wait for B before the final callbacks. Memory returns to the stream it came from.

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

    S reads the reduced bucket, not ``param.grad``; C waits for S before anybody can change it.
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
from zero_optim.hooks.overlap.passes import Task
from zero_optim.iteration.overlap import Overlap


class Line(Protocol):
    """A queue of DDP's buckets, stepped one by one."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Append one pass's buckets in order; `Overlap.wait_for_steps` waits for them."""
        ...


def line_of(overlap: Overlap) -> Line:
    """Return a queue: Note [A thread or none]."""
    return ThreadLine(overlap) if overlap.takes_thread else InlineLine(overlap)


_END_TIMEOUT = 10.0  # seconds
_Queue: TypeAlias = "queue.SimpleQueue[Task | None]"

# Stepping threads and their queues. Global, as the process waits at exit even for threads without a
# `ThreadLine`; weak, so that ended threads leave.
_THREADS: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()


class ThreadLine:
    """A queue with a thread, which ends with this object."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._queue: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._queue,), name="zero_step", daemon=True)
        thread.start()
        _THREADS[thread] = self._queue
        # Does not join the thread, which may wait for another rank: a finalizer can run anywhere.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def put(self, tasks: Sequence[Task]) -> None:
        """See `Line`."""
        for task in tasks:
            self._overlap.announce(task.done.wait)
            self._queue.put(task)


@atexit.register
def _end_threads() -> None:
    """End all threads before one deadline; an exit while a thread is inside PyTorch aborts the process."""
    threads = list(_THREADS.items())
    for _, line in threads:
        line.put(None)
    deadline = time.monotonic() + _END_TIMEOUT
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _work(line: "_Queue") -> None:
    """Run the thread, which keeps nothing alive while idle; a failure completes the future, or DDP hangs."""
    while (task := line.get()) is not None:
        result, gradients = task.buffer, None
        try:
            with torch.no_grad():
                result, gradients = task.receive()
                task.step(gradients)
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            task.of.error = task.of.error or error
        task.complete(result)
        del task, result, gradients


class InlineLine:
    """A queue without a thread: each bucket's hook steps the one before.

    A bucket's future completes in its own hook, as a later one may not come; with NCCL only the stream waits.
    """

    def __init__(self, overlap: Overlap) -> None:
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
        """Step what a broken pass, or an unused last bucket, left; make the current stream wait."""
        for device in {task.buffer.device for task, _ in self._received}:
            here = recorded_event(device)
            with self._streams.using(device):
                wait_for_event(device, here)
        self._step_received()
        self._streams.join()

    def _receive(self, task: Task) -> None:
        gradients, device = None, task.buffer.device
        here = recorded_event(device)
        with task.of.minding(), torch.no_grad(), self._streams.using(device):
            wait_for_event(device, here)
            result, gradients = task.receive()
            task.complete(result)  # on this stream, which waits for the reduction
        if not task.done.done():
            task.complete(task.buffer)
        self._received.append((task, gradients))

    def _step_received(self) -> None:
        received, self._received = self._received, []
        for task, gradients in received:
            with task.of.minding(), torch.no_grad(), self._streams.using(task.buffer.device):
                task.step(gradients)
