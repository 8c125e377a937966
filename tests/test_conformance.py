"""benchmarks/conformance.py runs, and tells right from wrong from refused."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "conformance.py"


def test_cells_that_are_equal_refused_and_silently_wrong_are_told_apart() -> None:
    arguments = ["--dry", "--verbose", "--loops", "plain", "--systems", "zero", "ours1"]
    classes = ["--classes", "torch.optim.SGD", "torch.optim.LBFGS"]
    command = [sys.executable, str(SCRIPT), *arguments, *classes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [
        line.split()
        for line in done.stdout.splitlines()
        if " plain " in line[:60] and "embeddings" not in line
    ]
    answers = {(line[0], line[2]): line[3] for line in lines}
    assert answers == {
        ("torch.optim.SGD", "zero"): "bits",
        ("torch.optim.SGD", "ours1"): "bits",
        ("torch.optim.LBFGS", "zero"): "wrong",
        ("torch.optim.LBFGS", "ours1"): "refused",
    }
