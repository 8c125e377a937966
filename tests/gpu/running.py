"""Runs cases on the ranks of a pool, one after the other; writes the table and ``benchmarks/results``."""

import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter

import torch

from gpu.cases import SECTIONS, Case
from gpu.setting import MOST_SECONDS, Figures, Outcome, Setup, on_rank
from pool import Pool, RankError

TIMEOUT = 500.0  # seconds for one case on the CPU; one that succeeds does not wait for them
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases run: the type of the device, a folder that is empty, and one for traces."""

    device_type: str
    folder: Path
    kept: Path | None = None

    @property
    def limit(self) -> float:
        """Return the seconds of one case."""
        return MOST_SECONDS if self.device_type == "cuda" else TIMEOUT


def run_case(pool: Pool, case: Case, setup: Setup, place: Place, number: int) -> Row:
    """Run one case in one of its setups."""
    missing = setup.missing(place.device_type)
    if missing:
        return Row(case.name, setup.name, "left out", {}, missing)
    begin, folder = perf_counter(), place.folder / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder, folder / "store", place.kept
    call = setup, place.device_type, paths, case.starts_itself, case.function, case.args
    try:
        outcome: Outcome = pool.run(setup.num_ranks, on_rank, *call, timeout=place.limit)[0]
    except RankError as error:
        return Row(case.name, setup.name, "fails", {}, _last_line(error), str(error), perf_counter() - begin)
    if outcome.not_here:
        return Row(case.name, setup.name, "left out", {}, outcome.not_here)
    return Row(case.name, setup.name, "holds", outcome.figures, seconds=perf_counter() - begin)


def run_all(pool: Pool, cases: Sequence[Case], place: Place, setups: Sequence[str] = ()) -> Iterator[Row]:
    """Run cases in all their setups, or in those whose names begin with one of ``setups``.

    On a GPU the rest of a section is left out once its time is over.
    """
    chosen = [
        (case, setup)
        for case in cases
        for setup in case.setups
        if not setups or setup.name.startswith(tuple(setups))
    ]
    spent = dict.fromkeys(SECTIONS, 0.0)
    for number, (case, setup) in enumerate(chosen, 1):
        if place.device_type == "cuda" and spent[case.section] > SECTIONS[case.section]:
            row = Row(case.name, setup.name, "left out", {}, f"the time for {case.section} is over")
        else:
            row = run_case(pool, case, setup, place, number)
        spent[case.section] += row.seconds
        yield row
        rest = row.why or figures_text(row)
        line = (
            f"[{number}/{len(chosen)}] {row.result:8} {row.name} | {row.setup} | {row.seconds:.1f} s {rest}"
        )
        sys.stdout.write(f"{line.rstrip()}\n{row.report[-6000:]}\n" if row.report else f"{line.rstrip()}\n")
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


def describe_machine(device_type: str) -> dict[str, object]:
    """Describe what the cases ran on."""
    about: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }
    if device_type == "cpu":
        return {"device": "cpu", **about}
    return {
        "device": torch.cuda.get_device_name(0),
        "cards": torch.cuda.device_count(),
        "memory_mib": torch.cuda.get_device_properties(0).total_memory // 2**20,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        **about,
    }


def table(rows: Sequence[Row]) -> str:
    """Write the table in Markdown."""
    lines = ["| case | process group | result | figures, or why |", "|---|---|---|---|"]
    for row in rows:
        about = (row.why or figures_text(row)).replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.name} | {row.setup} | {row.result} | {about} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Count the results."""
    counts = Counter(row.result for row in rows)
    return ", ".join(f"{counts[result]} {result}" for result in ("holds", "fails", "left out"))


class Record:
    """The record of a run, ``gpu-DEVICE.jsonl``: the machine, then a line for each case once it is over.

    It takes the place of an older one of the same device. `close` adds the table, ``gpu-DEVICE.md``.
    """

    def __init__(self, device_type: str, command: str, folder: Path = RESULTS) -> None:
        self._machine = describe_machine(device_type)
        self._about = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), command
        name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", str(self._machine["device"]).lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [folder / f"{name}.jsonl", folder / f"{name}.md"]
        self.paths[0].write_text(_line(date=self._about[0], command=command, machine=self._machine))

    def add(self, row: Row) -> None:
        """Append a row."""
        report = {"report": row.report[-8000:]} if row.report else {}
        about = {"case": row.name, "setup": row.setup, "result": row.result, "seconds": round(row.seconds, 1)}
        with self.paths[0].open("a") as file:
            file.write(_line(**about, figures=row.figures, why=row.why, **report))

    def close(self, rows: Sequence[Row]) -> None:
        """Write the table."""
        about = "; ".join(f"{key} {value}" for key, value in self._machine.items())
        date, command = self._about
        text = f"# The GPU suite\n\n{date}; `{command}`\n\n{about}\n\n{summary(rows)}\n\n{table(rows)}\n"
        self.paths[1].write_text(text)


def _line(**content: object) -> str:
    return json.dumps(content) + "\n"
