"""Queues of buckets to be stepped, by a thread or by the next bucket's hook.

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
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from zero_optim.compat.streams import StreamBeside
from zero_optim.flow.flow import Flow
from zero_optim.hooks.passes import Task
from zero_optim.iteration.overlap import Overlap

_END_TIMEOUT = 10.0  # seconds
_Tasks: TypeAlias = "queue.SimpleQueue[Task | None]"

# Stepping threads and their tasks. Global, as the process waits at exit even for threads without a
# `ThreadQueue`; weak, so that ended threads leave.
_THREADS: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()


class ThreadQueue:
    """A queue with a thread, which ends with this object."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._tasks: _Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks,), name="zero_step", daemon=True)
        thread.start()
        _THREADS[thread] = self._tasks
        # Does not join the thread, which may wait for another rank: a finalizer can run anywhere.
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def put(self, tasks: Sequence[Task]) -> None:
        """Append a pass's buckets in order; `Overlap.wait_for_steps` waits for them."""
        for task in tasks:
            self._overlap.under_way.start(lambda done=task.done: done)  # type: ignore[misc]
            self._tasks.put(task)


@atexit.register
def _end_threads() -> None:
    """End all threads before one deadline; an exit while a thread is inside PyTorch aborts the process."""
    threads = list(_THREADS.items())
    for _, tasks in threads:
        tasks.put(None)
    deadline = time.monotonic() + _END_TIMEOUT
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: _Tasks) -> None:
    """Run the thread, which keeps nothing alive while idle; a failure completes the future, or DDP hangs."""
    while (task := tasks.get()) is not None:
        result, gradients = task.buffer, None
        try:
            with torch.no_grad():
                result, gradients = task.receive()
                task.step(gradients)
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            task.of.error = task.of.error or error
        task.complete(result)
        del task, result, gradients


@dataclass(slots=True, eq=False)
class _Received:
    """A reduced bucket, to be stepped on the side stream."""

    task: Task
    gradients: Sequence[Tensor] | None
    streams: StreamBeside

    def wait(self) -> None:
        with self.task.of.storing_errors(), torch.no_grad(), self.streams.using(self.task.buffer.device):
            self.task.step(self.gradients)


class InlineQueue:
    """A queue without a thread: each bucket's hook steps the one before.

    A bucket's future completes in its own hook, as a later one may not come; with NCCL only the stream waits.
    """

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._streams = StreamBeside()
        self._received = Flow(1)
        self._device = torch.device("cpu")  # of the bucket received last

    def put(self, tasks: Sequence[Task]) -> None:
        """Append a pass's buckets in order; `Overlap.wait_for_steps` steps and waits for the rest."""
        for task in tasks:
            if not self._overlap.under_way:
                self._overlap.under_way.start(lambda: self)
            self._received.start(partial(self._receive, task))
        if tasks and tasks[-1].of.is_complete:
            self._received.wait()

    def wait(self) -> None:
        """Step what a broken pass, or an unused last bucket, left; make the current stream wait."""
        if self._received:
            with self._streams.behind(self._device):
                self._received.wait()
        self._streams.join()

    def _receive(self, task: Task) -> _Received:
        gradients, self._device = None, task.buffer.device
        with task.of.storing_errors(), torch.no_grad(), self._streams.behind(self._device):
            result, gradients = task.receive()
            task.complete(result)  # on this stream, which waits for the reduction
        if not task.done.done():
            task.complete(task.buffer)
        return _Received(task, gradients, self._streams)
