"""Measures the matrix of failures of tests/matrix.py, and writes it into docs/failures.md.

    python docs/make_failure_table.py

It takes a minute. It ends with an error if a cell fails, or if a survivor raised later than two
seconds after the timeout; so leave the machine alone meanwhile. With ``--jitter`` it makes the long run with
pauses in the place of that, and writes nothing.
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from jitter import run_jittery  # noqa: E402
from matrix import BEGIN, END, RUN, run_cells, table  # noqa: E402
from troubled import TIMEOUT  # noqa: E402

TARGET = ROOT / "docs" / "failures.md"
LATEST = TIMEOUT + 2.0  # seconds


def measure() -> int:
    """Run every cell, and write the table; tell whether all is well."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = run_cells(RUN, Path(folder))
    complaints = [complaint for result in results if (complaint := result.complaint())]
    complaints += [f"{result.cell}: {result.seconds:.2f} s" for result in results if result.seconds > LATEST]
    page = TARGET.read_text()
    before, _, rest = page.partition(BEGIN)
    TARGET.write_text(f"{before}{BEGIN}\n{table(results)}\n\n{END}{rest.partition(END)[2]}")
    longest = max(results, key=lambda result: result.seconds)
    took = time.monotonic() - began
    sys.stderr.write(
        f"{len(results)} cells in {took:.0f} s, the latest after {longest.seconds:.2f} s ({longest.cell}), "
        f"{len(complaints)} failed\n"
    )
    sys.stderr.write("".join(f"{complaint}\n" for complaint in complaints))
    return 1 if complaints else 0


def jitter(steps: int = 20_000, timeout: float = 2.0, long: int = 20) -> int:
    """Make the long run; tell whether all ranks came to its end."""
    began = time.monotonic()
    said = run_jittery(steps, timeout, long)
    sys.stderr.write(f"timeout {timeout} s, {time.monotonic() - began:.0f} s:\n")
    sys.stderr.write("".join(f"rank {rank}: {each}\n" for rank, each in enumerate(said)))
    return 0 if all(isinstance(each, tuple) for each in said) else 1


if __name__ == "__main__":
    sys.exit(jitter() if sys.argv[1:] == ["--jitter"] else measure())
