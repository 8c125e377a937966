"""The line of buckets in front of the thread that steps: how it ends, and what is in it then."""

import threading
from typing import Any

import pytest
import torch

from fake_streams import fake_streams
from zero_optim.flow.flow import Flow
from zero_optim.hooks import passes, queues


class Announcing:
    """Stands for an `Overlap`."""

    def __init__(self) -> None:
        self.under_way = Flow()


class Busy:
    """A task that goes on when the test lets it."""

    of: Any = None

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.buffer, self.done = torch.zeros(1), torch.futures.Future[torch.Tensor]()

    def receive(self) -> tuple[torch.Tensor, None]:
        self.thread = threading.current_thread()
        self.has_begun.set()
        self.may_end.wait()
        return self.buffer, None

    def step(self, gradients: object) -> None:
        pass

    def complete(self, result: torch.Tensor) -> None:
        self.done.set_result(result)


def busy_line() -> tuple[queues.ThreadQueue, Any]:
    busy: Any = Busy()
    made = queues.ThreadQueue(Announcing())  # type: ignore[arg-type]
    made.put([busy])
    busy.has_begun.wait()
    return made, busy


def test_a_line_that_goes_while_its_thread_is_busy_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made, busy = busy_line()
    waits = list[object]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda *args: waits.append(args))
        del made
    busy.may_end.set()
    assert not waits
    assert busy.thread is not None
    busy.thread.join()  # it ends, as its line has gone


def test_the_process_waits_for_all_threads_up_to_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, one), (second, other) = busy_line(), busy_line()
    del first  # its thread is waited for all the same
    now, limits = 0.0, list[float]()

    def join(thread: threading.Thread, limit: float) -> None:
        nonlocal now
        if thread in (one.thread, other.thread):
            limits.append(limit)
            now += limit

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        patch.setattr(queues.time, "monotonic", lambda: now)
        queues._end_threads()
    assert limits == [queues._END_TIMEOUT, 0.0]
    for busy in (one, other):
        busy.may_end.set()
        assert busy.thread is not None
        busy.thread.join()
    del second


def test_a_bucket_left_when_backward_ends_is_stepped_behind_the_callers_stream() -> None:
    awaited = list[int]()

    class Bucket(Busy):
        def receive(self) -> tuple[torch.Tensor, None]:
            return self.buffer, None

        def step(self, gradients: object) -> None:
            awaited.append(len(accelerator.stack[-1].awaited))

    overlap: Any = Announcing()
    of = passes.SteppedPass(overlap, (), False)
    with fake_streams() as accelerator:
        bucket: Any = Bucket()
        bucket.of = of
        queues.InlineQueue(overlap).put([bucket])
        assert not awaited
        overlap.under_way.wait()
    assert (awaited, of.error) == ([2], None), "once in its hook, and once when backward ended"
