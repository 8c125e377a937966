"""One cell: a class, a loop and a system. It is run on two ranks and compared with the unsharded run."""

import random
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conform.loops import LOOPS, train
from conform.model import SIZE, Tower
from conform.our_systems import SYSTEMS
from conform.ranks import Report, run_on_ranks
from conform.systems import Reference
from conform.trials import TRIALS

LIMIT = 60.0  # seconds of a cell; a busy machine gets more, once
MORE = 5
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-4}
NOISE = {torch.float64: 1e-15, torch.float32: 1e-7}
NOISE_HALF = 2.0**-8  # of classes that round to bfloat16
NUM_NOISY = 3
MARGIN, CAP = 30, 0.02  # times what noise makes, up to this part of the way
SURE = 3  # times what noise makes, however much that is
ENDED = re.compile(r"timed? ?out|Connection (closed|reset)|Broken pipe|Socket closed", re.IGNORECASE)

Arrays = list[Any]


@dataclass(frozen=True)
class Unsharded:
    """The unsharded run of a class and loop.

    Args:
        ends: its parameters; after a resumed loop those of a run without a break too, and after accumulating
            those of the other order of sums.
        way: the largest change of a parameter.
        tolerance: what counts as rounding, in parts of the way.
        noisy: what may be rounding.
        error: if the class itself cannot do this.
    """

    ends: list[Arrays]
    way: float
    tolerance: float
    noisy: float
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """The verdict of a cell.

    Args:
        status: "bits", "equal" (but for rounding), "unclear" (the class makes too much of rounding), "wrong",
            "refused", "hung", "dead", "no" (not offered), or "none" (the class itself cannot do this).
        note: the error, or how far off.
    """

    status: str
    note: str = ""


def unsharded(name: str, loop: str, dtype: torch.dtype) -> Unsharded:
    """Run a class and loop unsharded, once as it is and some times with noise, on a process apart."""
    (report,) = run_on_ranks(1, 2 * LIMIT, _unsharded, name, loop, dtype)
    if report.kind != "value":
        return Unsharded([], 0.0, 0.0, 0.0, f"{report.value or report.kind}: {report.text}")
    result: Unsharded = report.value
    return result


def _unsharded(name: str, loop: str, dtype: torch.dtype) -> Unsharded:
    _prepare()
    trial = TRIALS[name]
    start = [param.detach().numpy() for param in Tower(trial.feed, dtype).parameters()]
    noise = NOISE_HALF if trial.is_half else NOISE[dtype]
    ends = []
    for seed in range(1 + NUM_NOISY):
        torch.manual_seed(0)
        make = partial(Reference, noise=noise if seed else 0.0, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            run = train(make, 0, trial, LOOPS[loop], dtype, Path(folder))
        ends.append([weight.numpy() for weight in run.weights()])
    way = distance(ends[0], start)
    if not 0 < way < float("inf"):
        raise ArithmeticError(f"the parameters moved by {way}")
    apart = max(distance(end, ends[0]) / way for end in ends[1:])
    accepted = [ends[0]]
    if LOOPS[loop].resumes_at is not None:  # loading may cast a state, and then the bits differ
        run = train(Reference, 0, trial, LOOPS["plain"], dtype, Path())
        accepted.append([weight.numpy() for weight in run.weights()])
    if LOOPS[loop].passes > 1:  # ranks may add up in each pass, or after the last one
        make = partial(Reference, by_pass=True)
        run = train(make, 0, trial, LOOPS[loop], dtype, Path())
        accepted.append([weight.numpy() for weight in run.weights()])
    noisy = SURE * apart
    tolerance = noisy if trial.is_half else max(FLOOR[dtype], min(CAP, MARGIN * apart))
    return Unsharded(accepted, way, tolerance, noisy)


def distance(one: Arrays, other: Arrays) -> float:
    """Return the largest difference of an element; infinite if there are NaNs in one of them alone."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
        apart[np.isnan(a) & np.isnan(b)] = 0.0
        largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
    return largest


def run_cell(name: str, loop: str, system: str, expected: Unsharded, limit: float = LIMIT) -> Outcome:
    """Run a cell and compare it."""
    if expected.error:
        return Outcome("none", expected.error)
    if loop in SYSTEMS[system].lacks:
        return Outcome("no", SYSTEMS[system].lacks[loop])
    if TRIALS[name].closure and not SYSTEMS[system].takes_closures:
        return Outcome("no", "its step() takes no closure")
    for seconds in (limit, MORE * limit):
        with tempfile.TemporaryDirectory() as folder:
            reports = run_on_ranks(SIZE, seconds, _sharded, name, loop, system, folder)
        if all(report.kind != "silent" for report in reports):
            break
    return verdict(reports, expected)


def _sharded(name: str, loop: str, system: str, folder: str) -> Arrays:
    _prepare()
    make = SYSTEMS[system]
    run = train(make, dist.get_rank(), TRIALS[name], LOOPS[loop], make.dtype, Path(folder))
    return [weight.numpy() for weight in run.weights()]


def _prepare() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    torch.compiler.set_stance("force_eager")  # it would compile for minutes


def verdict(reports: list[Report], expected: Unsharded) -> Outcome:
    """Combine what the ranks reported."""
    errors = {rank: report for rank, report in enumerate(reports) if report.kind == "error"}
    for rank, report in enumerate(reports):
        if report.kind == "dead":
            return Outcome("dead", f"{report.text} (rank {rank})")
    raised = {rank: report for rank, report in errors.items() if not ENDED.search(report.text)}
    if len(raised) == len(reports):
        return Outcome("refused", _first(raised))
    if errors or any(report.kind == "silent" for report in reports):
        return Outcome("hung", _first(raised or errors))
    offs = [max(distance(report.value, end) for report in reports) / expected.way for end in expected.ends]
    off = min(offs)
    apart = distance(reports[0].value, reports[1].value) / expected.way
    note = f"off by {off:.1g} of the way" + (f", replicas apart by {apart:.1g}" if apart > 0 else "")
    if off == 0:
        return Outcome("bits")
    if off <= expected.tolerance:
        return Outcome("equal", note)
    return Outcome("unclear" if offs[0] <= expected.noisy else "wrong", note)


def _first(errors: Mapping[int, Report]) -> str:
    """Write the first error in a line."""
    if not errors:
        return "no rank raised"
    rank, report = next(iter(errors.items()))
    text = (report.text.strip().splitlines() or [""])[0][:300]
    alone = f" (rank {rank} alone)" if len(errors) < SIZE else ""
    return f"{report.value}: {text}{alone}"
