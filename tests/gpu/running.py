"""Runs cases on the ranks of a pool, one after the other, and keeps what came out."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from gpu.cases import Case
from gpu.setting import Figures, Outcome, Setup, on_rank
from pool import Pool, RankError

TIMEOUT = 180.0  # seconds for one call


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Args:
        name: the case.
        setup: where it was run.
        result: "holds", "fails" or "left out".
        figures: what was measured.
        why: of a failure the last line of its traceback, of what was left out the reason.
        report: of a failure everything that the ranks reported.
        seconds: how long it took.
    """

    name: str
    setup: str
    result: str
    figures: Figures
    why: str = ""
    report: str = ""
    seconds: float = 0.0


def run_case(pool: Pool, case: Case, setup: Setup, device_type: str, folder: Path) -> Row:
    """Run one case in one setup.

    Args:
        pool: runs the ranks.
        case: what.
        setup: where; one of the case's.
        device_type: "cuda" or "cpu".
        folder: empty, for the case's files.
    """
    missing = setup.missing(device_type)
    if missing:
        return Row(case.name, setup.name, "left out", {}, missing)
    begin = perf_counter()
    figures: Figures = {}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number, phase in enumerate(case.phases):
            paths = folder, folder / f"store-{number}"
            ranks = phase.num_ranks or setup.num_ranks
            sent = setup, device_type, paths, case.starts_itself, phase.function, phase.args
            outcomes: list[Outcome] = pool.run(ranks, on_rank, *sent, timeout=TIMEOUT)
            if outcomes[0].not_here:
                return Row(case.name, setup.name, "left out", {}, outcomes[0].not_here)
            figures |= outcomes[0].figures
    except RankError as error:
        text = str(error)
        why = _last_line(error)
        return Row(case.name, setup.name, "fails", {}, why, text, perf_counter() - begin)
    return Row(case.name, setup.name, "holds", figures, seconds=perf_counter() - begin)


def run_all(
    pool: Pool, cases: Sequence[Case], device_type: str, folder: Path, setups: Sequence[str] = ()
) -> Iterator[Row]:
    """Run cases in all their setups, or in those whose names begin as given."""
    number = 0
    for case in cases:
        for setup in case.setups:
            if setups and not setup.name.startswith(tuple(setups)):
                continue
            number += 1
            yield run_case(pool, case, setup, device_type, folder / str(number))


def _last_line(error: RankError) -> str:
    """Find the line that says most: the exception of the first rank that raised one."""
    for text in error.reports.values():
        raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
        if raised:
            return raised[-1][:300]
    return str(error).splitlines()[0]


def show(row: Row, number: int, total: int) -> None:
    """Print one row as soon as it is there."""
    rest = row.why or "; ".join(f"{key} {value}" for key, value in row.figures.items())
    line = f"[{number}/{total}] {row.result:8} {row.name} | {row.setup} | {row.seconds:.1f} s {rest}"
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()
