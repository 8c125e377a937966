"""Compare every optimizer class, in every loop and system, with unsharded training.

    python benchmarks/conformance.py                                  # all cells, then the page
    python benchmarks/conformance.py --classes AdamW Lamb --loops plain clip --systems zero fsdp2
    python benchmarks/conformance.py --page                           # the page alone, from the record
    python benchmarks/conformance.py --reproduce                      # the scripts of the causes

Two ranks on this machine, over gloo. The record is results/conformance.json; a run of some cells replaces
these alone. The page is docs/conformance.md. Packages that are not installed are left out.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path[:0] = [
    path for path in (str(Path(__file__).parents[1]), str(Path(__file__).parent)) if path not in sys.path
]

import torch  # noqa: E402
from conform.causes import CAUSES  # noqa: E402
from conform.cells import Outcome, Unsharded, run_cell, unsharded  # noqa: E402
from conform.loops import LOOPS  # noqa: E402
from conform.our_systems import SYSTEMS  # noqa: E402
from conform.page import PAGE, RECORD, page_of  # noqa: E402
from conform.trials import TRIALS, is_installed  # noqa: E402

# Imported once, before ranks are forked: each would take seconds in every cell.
PRELOADED = {
    "torch": (
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
    ),
    "zero_optim": (),
    "fairscale": ("fairscale.nn", "fairscale.optim"),
    "deepspeed": ("torch._inductor.compile_fx", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
}
Record = dict[str, Any]


def main() -> None:
    options = _arguments()
    if options.reproduce:
        reproduce()
        return
    record: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": {}, "cells": {}}
    if not options.page:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        available = _prepare(options.systems or list(SYSTEMS))
        names = [name for name in _matching(options.classes, TRIALS) if is_installed(TRIALS[name])]
        systems = [name for name in options.systems or SYSTEMS if SYSTEMS[name].package in available]
        loops = options.loops or list(LOOPS)
        record["versions"] |= available | _versions(names)
        start, counts = time.monotonic(), Counter[str]()
        known = record["cells"] if options.missing else {}
        for name, system, loop, outcome in run(names, loops, systems, known):
            of_class = record["cells"].setdefault(name, {}).setdefault(system, {})
            of_class[loop] = [outcome.status, outcome.note]
            counts[outcome.status] += 1
            if not options.dry:
                _keep(record)
            if options.verbose or outcome.status in ("wrong", "hung", "dead"):
                print(f"{name:34} {loop:11} {system:12} {outcome.status:8} {outcome.note[:120]}", flush=True)
        print(f"{sum(counts.values())} cells in {time.monotonic() - start:.0f} s: {dict(counts)}")
    if not options.dry:
        PAGE.write_text(page_of(record))
        print(PAGE)


def _keep(record: Record) -> None:
    """Write the record, a class a line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in record["cells"].items())
    RECORD.write_text(f'{{"versions": {json.dumps(record["versions"])},\n"cells": {{\n{lines}\n}}}}\n')


def reproduce() -> None:
    """Run every script that shows a cause, and print what it says."""
    for cause in CAUSES:
        script = Path(__file__).parent / "reproducers" / cause.script
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        answers = [line for line in done.stdout.splitlines() if line.startswith(("WRONG", "equal"))]
        print(f"{cause.script:32} {answers[-1] if answers else 'failed'}", flush=True)


def run(
    names: list[str], loops: list[str], systems: list[str], known: dict[str, Any]
) -> Iterator[tuple[str, str, str, Outcome]]:
    """Run cells, one after the other, without those that are known."""
    for loop in loops:
        for name in names:
            expected: dict[torch.dtype, Unsharded] = {}
            for system in systems:
                if loop in known.get(name, {}).get(system, {}):
                    continue
                dtype = SYSTEMS[system].dtype
                if dtype not in expected:
                    expected[dtype] = unsharded(name, loop, dtype)
                yield name, system, loop, run_cell(name, loop, system, expected[dtype])


def _prepare(systems: list[str]) -> dict[str, str]:
    """Import what ranks need, and return the versions of the systems that are there."""
    packages = dict.fromkeys(["torch", *(SYSTEMS[name].package for name in systems)])
    available = {}
    for package in packages:
        try:
            for name in PRELOADED[package]:
                import_module(name)
        except ImportError:
            print(f"{package} is not installed")
        else:
            available[package] = _version(package)
    if "deepspeed" in available:
        _ = sys.modules["deepspeed"].ops.__compatible_ops__  # it looks for compilers, once
    return available


def _versions(names: list[str]) -> dict[str, str]:
    return {
        package: _version(package) for package in {TRIALS[name].package.partition(".")[0] for name in names}
    }


def _version(package: str) -> str:
    try:
        return version(package.replace("_", "-")).partition("+")[0]
    except PackageNotFoundError:
        return ""


def _matching(starts: list[str] | None, names: dict[str, Any]) -> list[str]:
    """Return the names that start, with or without their package, as asked for."""
    starts = [start.lower() for start in starts or [""]]
    return [name for name in names if any(_starts(name.lower(), start) for start in starts)]


def _starts(name: str, start: str) -> bool:
    return name.startswith(start) or name.partition(" ")[0].rpartition(".")[2].startswith(start)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--classes", nargs="+", metavar="START", help="how names start, with or without the package"
    )
    parser.add_argument("--loops", nargs="+", choices=LOOPS, help="some loops")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="some systems")
    parser.add_argument("--page", action="store_true", help="run no cell, write the page from the record")
    parser.add_argument("--reproduce", action="store_true", help="run the script of every cause instead")
    parser.add_argument("--missing", action="store_true", help="run only what the record lacks")
    parser.add_argument("--dry", action="store_true", help="keep no record, write no page")
    parser.add_argument("--verbose", action="store_true", help="print every cell, not the bad ones alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
