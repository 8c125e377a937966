"""Recipes as data, and what is under way."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any
from unittest import mock

import pytest
import torch

from fake_streams import fake_streams
from zero_optim.compat.streams import StreamBeside
from zero_optim.errors import StalledError
from zero_optim.flow.flow import Flow, Worker
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import (
    LAZY,
    OVERLAP,
    RECIPES,
    ZERO1,
    ZERO3,
    Moment,
    Operation,
    Placement,
    Schedule,
)
from zero_optim.shard.engine import Engine
from zero_optim.shard.task import Task


def picture() -> str:
    """The recipes as a table, with a column for each moment."""
    rows = [["recipe", *(moment.value for moment in Moment)]]
    for name, schedule in RECIPES.items():
        rows.append([name, *(", ".join(each.value for each in schedule[moment]) for moment in Moment)])
    widths = [min(18, max(9, *(len(row[at]) for row in rows[1:]))) for at in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [wrap(text, width) for text, width in zip(row, widths, strict=True)]
        lines += ["  ".join(map(str.ljust, parts, widths)) for parts in zip_longest(*cells, fillvalue="")]
        if row is rows[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def placements() -> str:
    """What a rank holds between two steps, as rows in Markdown; recipes that hold the same share one."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, row in RECIPES.items():
        names.setdefault((row.parameters.value, row.gradients.value), []).append(name)
    own = Placement.ROW.value
    return "\n".join(f"| {', '.join(same)} | {' | '.join(kind)} | {own} |" for kind, same in names.items())


def test_the_pictures_of_the_design_are_drawn_from_the_schedules() -> None:
    design = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    assert f"```\n{picture()}\n```" in design
    assert f"\n{placements()}\n" in design


@pytest.mark.parametrize(
    ("moment", "operations", "message"),
    [
        (Moment.STEP, (Operation.GATHER, Operation.WAIT), "stepped in step"),
        (Moment.STEP, (Operation.STEP,), "expected a gather"),
    ],
)
def test_a_schedule_that_cannot_train_is_refused(
    moment: Moment, operations: tuple[Operation, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ZERO1, moments={**ZERO1.moments, moment: operations})


class Recorded(Task):
    """Writes down which operations are run on which buckets."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def step(self, buckets: Sequence[Any]) -> None:
        self.done += [("step", bucket.number) for bucket in buckets]

    def to_gather(self, buckets: Sequence[Any]) -> Sequence[Any]:
        self.done += [("gather", bucket.number) for bucket in buckets]
        return ()


class Scheduled:
    """A bucket for an engine, with a row of the table."""

    def __init__(self, number: int, schedule: Schedule, task: Recorded) -> None:
        self.number, self.schedule = number, schedule
        self._done = task.done

    def arrive(self) -> None:
        self._done.append(("wait", self.number))

    def free(self) -> None:
        self._done.append(("free", self.number))


def test_a_moment_runs_what_stands_in_the_row_of_each_bucket_in_order() -> None:
    task, engine = Recorded(), Engine()
    buckets = [Scheduled(*each, task) for each in enumerate((ZERO1, LAZY, OVERLAP, ZERO3))]
    engine.on(Moment.STEP, buckets, task)
    engine.on(Moment.BUCKET_REDUCED, buckets, task)
    engine.on(Moment.AFTER_FORWARD, buckets, task)
    assert task.done == [
        *(("step", 0), ("step", 1), ("step", 2), ("step", 3)),
        *(("gather", 0), ("gather", 1), ("gather", 2), ("wait", 0), ("wait", 2)),
        *(("step", 2), ("gather", 2)),
        ("free", 3),
    ]


def started(log: list[str], name: str, error: Exception | None = None) -> Pending[None]:
    def end(_: object) -> None:
        log.append(f"wait {name}")
        if error is not None:
            raise error

    log.append(f"start {name}")
    return Pending([], end)


def test_each_is_waited_for_once_by_key_or_in_order() -> None:
    log: list[str] = []
    flow = Flow()
    for name in ("ab", "bc", "d"):
        flow.start(partial(started, log, name), keys=name)
    flow.wait_for("c")
    assert log[3:] == ["wait bc"]
    assert flow.is_unclaimed
    flow.wait_for("bd")
    flow.wait()
    assert log[4:] == ["wait ab", "wait d"]
    assert not flow


def test_a_wait_that_failed_fails_at_every_later_look() -> None:
    log: list[str] = []
    flow = Flow()
    failed = started(log, "a", StalledError("planted", (1,)))
    flow.start(lambda: failed, keys="a")
    flow.start(partial(started, log, "b"), keys="b")
    looks = (flow.wait, flow.wait, partial(flow.wait_for, "b"), flow.finish_first, failed.wait)
    for look in looks:
        with pytest.raises(StalledError, match="planted") as raised:
            look()
        assert raised.value.missing == (1,)
    assert log[2:] == ["wait a"]
    flow.abandon()
    flow.wait()


@pytest.mark.parametrize("error", [KeyboardInterrupt("planted"), ConnectionError("planted")])
def test_work_that_failed_or_was_interrupted_never_seems_to_have_ended(error: BaseException) -> None:
    work = Pending([], mock.Mock(side_effect=[error, "not the value"]))
    for _ in range(2):
        with pytest.raises(type(error), match="planted"):
            work.wait()
    assert (work.is_unclaimed, work.has_failed, work.is_over) == (False, True, False)


class Busy:
    """Work that goes on when the test lets it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_begun, self.may_end, self.error = threading.Event(), threading.Event(), error
        self.thread: threading.Thread | None = None

    def begin(self) -> Pending[Any]:
        self.thread = threading.current_thread()
        self.has_begun.set()
        return Pending([self], list)

    def wait(self) -> None:
        assert threading.current_thread() is self.thread
        self.may_end.wait()
        if self.error is not None:
            raise self.error


def test_a_thread_starts_and_waits_in_order_beside_the_caller_and_goes_on_after_an_error() -> None:
    one, other = Busy(ConnectionError("planted")), Busy()
    flow = Flow(thread=Worker("steps"))
    for work in (one, other):
        flow.start(work.begin)
    one.has_begun.wait()
    assert not other.has_begun.is_set()
    assert (len(flow), one.thread and one.thread.name) == (2, "steps")
    one.may_end.set()
    other.may_end.set()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="planted"):
            flow.wait()
    flow.abandon()
    other.has_begun.wait()
    assert other.thread is one.thread is not None


def test_an_interrupted_wait_ends_when_the_thread_has_done_the_work() -> None:
    """It was not waited for any more, and the thread went on to write parameters."""
    busy = Busy()
    flow = Flow(thread=Worker("steps"))
    flow.start(busy.begin)
    busy.has_begun.wait()

    entry = flow._entries[0]
    end = entry.end
    assert end is not None

    class Interrupted(threading.Event):
        def is_set(self) -> bool:
            return end.is_set()

        def wait(self, timeout: float | None = None) -> bool:
            if busy.may_end.is_set():
                return end.wait(timeout)
            busy.may_end.set()
            raise KeyboardInterrupt

    entry.end = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        flow.wait()
    assert end.is_set()
    flow.wait()
    assert not flow


def test_work_waits_on_a_stream_behind_the_callers_which_waits_for_it_once() -> None:
    numbers: list[int] = []
    with fake_streams() as accelerator:
        main = accelerator.stack[0]

        def wait(_: object) -> None:
            assert {event.stream for event in accelerator.stack[-1].awaited} == {main}
            numbers.append(len(accelerator.stack[-1].awaited))

        flow = Flow(1, streams=StreamBeside())
        for _ in range(2):
            flow.start(lambda: Pending([], wait), device=torch.device("cpu"))
        assert (numbers, main.awaited) == ([1], [])
        for _ in range(2):
            flow.wait()
        assert [event.stream.name for event in main.awaited] == ["beside"]
    assert numbers == [1, 2]


def test_work_that_began_behind_the_callers_stream_does_not_wait_for_later_work_there() -> None:
    with fake_streams() as accelerator:
        beside = StreamBeside()
        flow, numbers = Flow(1, streams=beside), list[int]()

        def begin() -> Pending[None]:
            with beside.behind(torch.device("cpu")):
                return Pending([], lambda _: numbers.append(len(accelerator.stack[-1].awaited)))

        for _ in range(3):
            flow.start(begin, device=torch.device("cpu"), is_behind=True)
        flow.wait()  # a broken-off pass may have been followed by anything
    assert numbers == [1, 2, 4]
