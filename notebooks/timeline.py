"""A profile of one iteration: a Chrome trace of ``torch.profiler``, and a picture."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

FORWARD, BACKWARD = "forward", "backward"  # ranges that a training loop marks
# How the profiler's names of events begin. Sends are left out, since each has a receive.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "compute": (FORWARD, BACKWARD),
    "reduce": (
        "gloo:all_reduce",
        "gloo:recv",
        "gloo:all_gather",
        "nccl:all_reduce",
        "nccl:all_to_all",
        "memory:sum",
    ),
    "step": ("Optimizer.step#",),
    "gather": ("gloo:broadcast", "nccl:broadcast", "memory:rows"),
}
_COLOURS = dict(zip(_NAMES, ("#4477aa", "#cc6677", "#228833", "#ddaa33"), strict=True))
_GATHER = "zero_optim.gather"  # what the library marks where it starts or awaits a gather
_OUTER_STEP = "Optimizer.step#ZeroRedundancyOptimizer"  # contains the local step and the gather
_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """An event's interval, in ms from the start of the first."""

    start: float
    stop: float
    row: str  # compute, reduce, step or gather
    name: str


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Profile all threads of this rank, and write a Chrome trace, which ui.perfetto.dev shows."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    try:
        threads = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    except TypeError:  # this PyTorch has no such option
        threads = {}
    with profile(activities=activities, **threads) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def spans_of(path: Path) -> list[Span]:
    """Read the spans of the four rows from a Chrome trace, sorted by start."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    gathers = [(event["ts"], _stop(event)) for event in events if event["name"].startswith(_GATHER)]
    ends = [_stop(event) for event in events if event["name"].startswith(_NODE)]
    spans = []
    for event in events:
        name, start, stop = event["name"], float(event["ts"]), _stop(event)
        row = next((row for row, starts in _NAMES.items() if name.startswith(starts)), None)
        if row is None or name.startswith(_OUTER_STEP):
            continue
        if name == "gloo:recv" and any(first <= start <= last for first, last in gathers):
            row = "gather"  # rows of units are received as gradients are
        if name.startswith(BACKWARD):  # at its end it waits for buckets and computes nothing
            stop = max((end for end in ends if start < end <= stop), default=stop)
        spans.append((start, stop, row, name))
    origin = min((start for start, *_ in spans), default=0.0)
    return sorted(Span((start - origin) / 1e3, (stop - origin) / 1e3, *rest) for start, stop, *rest in spans)


def _stop(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def hidden(spans: Sequence[Span]) -> float:
    """Return the fraction (0 to 1) of reductions, steps and gathers during forward or backward."""
    compute = [span for span in spans if span.row == "compute"]
    others = [span for span in spans if span.row != "compute"]
    total = sum(span.stop - span.start for span in others)
    under = sum(max(0.0, min(a.stop, b.stop) - max(a.start, b.start)) for a in others for b in compute)
    return under / total if total else 0.0


def _bars(spans: Sequence[Span], row: str) -> list[tuple[float, float]]:
    """Return begins and lengths in a row; parts of one message are one bar, none is too short to see."""
    small = max((span.stop for span in spans), default=0.0) / 200
    bars: list[tuple[float, float]] = []
    for start, stop in ((span.start, span.stop) for span in spans if span.row == row):
        if row != "compute" and bars and start - sum(bars[-1]) < small:
            first, length = bars.pop()
            bars.append((first, max(length, stop - first)))
        else:
            bars.append((start, max(stop - start, small)))
    return bars


def draw(pictures: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """Draw titled iterations below each other on one time axis, into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot it needs no display

    figure = Figure(figsize=(10, 0.8 + 1.9 * len(pictures)), layout="constrained")
    axes = figure.subplots(len(pictures), 1, sharex=True, squeeze=False)
    for (title, spans), axis in zip(pictures, axes[:, 0], strict=True):
        for place, row in enumerate(_NAMES):
            style = {"facecolors": _COLOURS[row], "edgecolor": "white", "linewidth": 0.5}
            axis.broken_barh(_bars(spans, row), (place - 0.38, 0.76), **style)
        for span in spans:
            if span.row == "compute":
                middle = (span.start + span.stop) / 2
                axis.text(middle, 0, span.name, color="white", ha="center", va="center", fontsize=8)
            if span.name.startswith(BACKWARD):
                axis.axvline(span.stop, color="grey", linestyle=":", linewidth=1)
        axis.set_yticks(range(len(_NAMES)), list(_NAMES))
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(
        "ms on one rank. Dotted: where the last gradient was computed.\n"
        "A gather without a step before it is of a bucket that other ranks own: this rank only receives."
    )
    figure.savefig(path, dpi=130)
