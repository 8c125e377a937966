"""The table at the end, and the record in ``benchmarks/results``."""

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from gpu.running import Row, figures_text

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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
