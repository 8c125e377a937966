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
    """One row of the table."""

    name: str  # of the case
    setup: str
    result: str  # "holds", "fails" or "left out"
    figures: Figures
    why: str = ""  # of a failure the last line of its traceback, of what was left out the reason
    report: str = ""  # of a failure everything that the ranks reported
    seconds: float = 0.0


def run_case(pool: Pool, case: Case, setup: Setup, device_type: str, folder: Path) -> Row:
    """Run one case in one of its setups; ``folder``, which is empty, is for its files."""
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
        return Row(case.name, setup.name, "fails", {}, _last_line(error), str(error), perf_counter() - begin)
    return Row(case.name, setup.name, "holds", figures, seconds=perf_counter() - begin)


def run_all(
    pool: Pool, cases: Sequence[Case], device_type: str, folder: Path, setups: Sequence[str] = ()
) -> Iterator[Row]:
    """Run cases in all their setups, or in those whose names begin with one of ``setups``."""
    chosen = [
        (case, setup)
        for case in cases
        for setup in case.setups
        if not setups or setup.name.startswith(tuple(setups))
    ]
    for number, (case, setup) in enumerate(chosen, 1):
        row = run_case(pool, case, setup, device_type, folder / str(number))
        yield row
        rest = row.why or figures_text(row)
        line = (
            f"[{number}/{len(chosen)}] {row.result:8} {row.name} | {row.setup} | {row.seconds:.1f} s {rest}"
        )
        sys.stdout.write(line.rstrip() + "\n")
        sys.stdout.flush()


def figures_text(row: Row) -> str:
    """Write figures as text."""
    return "; ".join(f"{key} {value}" for key, value in row.figures.items())


def _last_line(error: RankError) -> str:
    """Find the line that says most: the exception of the first rank that raised one."""
    for text in error.reports.values():
        raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
        if raised:
            return raised[-1][:300]
    return str(error).splitlines()[0]
