"""The GPU suite, on the CPU: its cases run, and what comes out is told as it is."""

from pathlib import Path

import pytest

from gpu.cases import all_cases
from gpu.running import run_all
from pool import Pool

# One of each kind; the others are slow tests.
QUICK = (
    "start: no backend, no set_device",
    "kernels: AdamW fused, cut by rows, float32",
    "table: overlap | tower | ordinary | plain",
    "parameters: checkpointing, not reentrant, bf16",
    "table: fully | tower | ordinary | mesh",
    "memory: gradients",  # the others import FSDP2, which takes seconds
    "overlap: several streams",
    "checkpoint: save_async, on one rank",
    "waits: zero_step, pretended group of 2",
    "speed: an iteration, small",
)


def check(pool: Pool, names: set[str], folder: Path) -> None:
    cases = [case for case in all_cases() if case.name in names]
    assert names
    assert {case.name for case in cases} == names
    rows = list(run_all(pool, cases, "cpu", folder))
    for row in rows:
        assert row.result != "fails", (row.name, row.setup, row.report)
    # What the CPU leaves out is known; a case that nobody can run would not be noticed otherwise.
    reasons = {row.why for row in rows if row.result == "left out"}
    assert reasons <= {
        "the CPU has no cards",
        "the CPU takes no device_id",
        "the CPU captures nothing",
        "this PyTorch does not have torch.optim.Muon",
        "nothing narrower than float32 is cut on the CPU",
    }


def test_cases_of_each_kind_run_on_the_cpu(pool: Pool, tmp_path: Path) -> None:
    check(pool, set(QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_case_runs_on_the_cpu(pool: Pool, tmp_path: Path) -> None:
    check(pool, {case.name for case in all_cases()} - set(QUICK), tmp_path)
