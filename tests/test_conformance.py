"""benchmarks/conformance.py runs, and tells right from wrong from refused; bad cells have causes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "conformance.py"
sys.path.append(str(BENCHMARKS))
from conform.causes import CAUSES, cause_of  # noqa: E402
from conform.page import BAD, PAGE, RECORD, page_of  # noqa: E402


@pytest.mark.slow
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


def test_every_bad_cell_of_the_record_has_a_cause_and_every_cause_a_cell_and_a_script() -> None:
    causes = {
        (name, loop, system): cause_of(name, loop, system)
        for name, systems in json.loads(RECORD.read_text())["cells"].items()
        for system, loops in systems.items()
        for loop, (status, _) in loops.items()
        if status in BAD
    }
    assert [cell for cell, cause in causes.items() if cause is None] == []
    assert not [cell for cell in causes if cell[2].startswith("ours")]
    assert set(causes.values()) == set(range(1, 1 + len(CAUSES)))
    for cause in CAUSES:
        lines = (BENCHMARKS / "reproducers" / cause.script).read_text().splitlines()
        assert len(lines) <= 40, cause.script
        assert any("WRONG" in line and "equal" in line for line in lines), cause.script


def test_the_page_is_that_of_the_record() -> None:
    assert PAGE.read_text() == page_of(json.loads(RECORD.read_text()))
