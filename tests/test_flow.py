"""Recipes as data, and what is under way."""

import threading
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any
from unittest import mock

import pytest

from zero_optim.errors import StalledError
from zero_optim.flow.flow import Flow, Worker
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import RECIPES, ZERO1, Moment, Operation, Placement


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
