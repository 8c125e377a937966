"""The picture of an iteration, from the profiler's own events."""

import json
from pathlib import Path

import pytest

from zero_optim.demo import trace
from zero_optim.demo.trace import Span


def event(name: str, start: float, stop: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": 1000 * start + 7.0, "dur": 1000 * (stop - start)}


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    listed = [
        event("forward", 0, 4),
        event("backward", 4, 20),  # its last eight ms are spent waiting
        event("autograd::engine::evaluate_function: MmBackward0", 4, 9),
        event("autograd::engine::evaluate_function: TBackward0", 9, 12),
        event("gloo:all_reduce", 6, 10),
        event("Optimizer.step#ZeroRedundancyOptimizer.step", 9, 24),
        event("Optimizer.step#AdamW.step", 10, 14),
        event("gloo:send", 14, 15),
        event("gloo:broadcast", 14, 18),
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": listed}))
    return path


def test_events_become_spans_and_waiting_is_no_computing(events: Path) -> None:
    assert trace.spans_of(events) == [
        Span(0, 4, "compute", "forward"),
        Span(4, 12, "compute", "backward"),
        Span(6, 10, "reduce", "gloo:all_reduce"),
        Span(10, 14, "step", "Optimizer.step#AdamW.step"),
        Span(14, 18, "gather", "gloo:broadcast"),
    ]


def test_the_hidden_share_is_what_lay_under_computing(events: Path) -> None:
    # Of 4 + 4 + 4 ms, the reduction and half of the step lay before the last gradient was computed.
    assert trace.hidden(trace.spans_of(events)) == pytest.approx(6 / 12)
    assert trace.hidden([Span(0, 1, "compute", "forward")]) == 0


def test_the_picture_is_drawn(events: Path, tmp_path: Path) -> None:
    spans = trace.spans_of(events)
    trace.draw([("one", spans), ("two", spans)], tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_anything_of_ours_has_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::add", 0, 1)]}))
    assert trace.spans_of(path) == []
