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

from gpu.cases import Case
from gpu.setting import Figures, Outcome, Setup, on_rank
from pool import Pool, RankError

TIMEOUT = 500.0  # seconds for one call; one that succeeds does not wait for them
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


def run_case(pool: Pool, case: Case, setup: Setup, device_type: str, folder: Path) -> Row:
    """Run one case in one of its setups; ``folder``, which is empty, is for its files."""
    missing = setup.missing(device_type)
    if missing:
        return Row(case.name, setup.name, "left out", {}, missing)
    begin = perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    call = setup, device_type, (folder, folder / "store"), case.starts_itself, case.function, case.args
    try:
        outcome: Outcome = pool.run(setup.num_ranks, on_rank, *call, timeout=TIMEOUT)[0]
    except RankError as error:
        return Row(case.name, setup.name, "fails", {}, _last_line(error), str(error), perf_counter() - begin)
    if outcome.not_here:
        return Row(case.name, setup.name, "left out", {}, outcome.not_here)
    return Row(case.name, setup.name, "holds", outcome.figures, seconds=perf_counter() - begin)


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


def write(rows: Sequence[Row], device_type: str, command: str, folder: Path = RESULTS) -> list[Path]:
    """Write ``gpu-DEVICE.json`` and ``.md``; a record takes the place of an older one of the same device."""
    machine = describe_machine(device_type)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-")
    kept = [
        {"case": r.name, "setup": r.setup, "result": r.result, "figures": r.figures, "why": r.why}
        | ({"report": r.report[-8000:]} if r.report else {})
        for r in rows
    ]
    record = {"date": date, "machine": machine, "command": command, "rows": kept}
    about = "; ".join(f"{key} {value}" for key, value in machine.items())
    text = f"# The GPU suite\n\n{date}; `{command}`\n\n{about}\n\n{summary(rows)}\n\n{table(rows)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    paths[1].write_text(text)
    return paths
