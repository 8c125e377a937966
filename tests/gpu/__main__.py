"""``python -m gpu``, with ``tests`` and the root on the path; ``make gpu`` calls it. See ``--help``."""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

from gpu.cases import all_cases
from gpu.running import RESULTS, Place, Record, run_all, summary, table
from pool import Pool


def main() -> int:
    """Run, print, keep the record; gives 1 if a case fails, 2 if there is no such device."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Every claim on a GPU, in one table.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu proves the suite itself"
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="cases whose names this is found in")
    parser.add_argument(
        "--setup", nargs="*", default=[], help="process groups by the beginning of their names"
    )
    parser.add_argument("--list", action="store_true", help="name the cases, and run none")
    parser.add_argument("--dry", action="store_true", help="print the table, keep no record")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the record goes")
    options = parser.parse_args()
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    if options.list:
        sys.stdout.writelines(f"{case.name} | {setup.name}\n" for case in cases for setup in case.setups)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no GPU that PyTorch can use: --device cpu runs the suite on the CPU instead\n")
        return 2
    # For the ranks, before they start: cuBLAS then gives the same bits in every call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    command = " ".join(["python", "-m", "gpu", *sys.argv[1:]])
    record = None if options.dry else Record(options.device, command, options.out)
    rows = []
    with tempfile.TemporaryDirectory(prefix="zero-optim-gpu-") as folder, Pool() as pool:
        place = Place(options.device, Path(folder), None if options.dry else options.out)
        for row in run_all(pool, cases, place, options.setup):
            rows.append(row)
            if record is not None:  # at once: what ends this process leaves a record
                record.add(row)
    sys.stdout.write(f"\n{table(rows)}\n\n{summary(rows)}\n")
    if record is not None:
        record.close(rows)
        sys.stdout.writelines(f"{path}\n" for path in record.paths)
    return int(any(row.result == "fails" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
