"""The GPU suite, on the CPU: its cases run, and what comes out is told as it is."""

import json
from pathlib import Path

import pytest
import torch

from gpu.cases import EVERYWHERE, GLOO, NCCL, Case, all_cases
from gpu.running import run_all, run_case, summary, table, write
from gpu.setting import Figures, Here, NotHere
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


def claim_that_is_false(here: Here) -> None:
    assert here.is_cuda, "the device is not CUDA"


def claim_that_cannot_be_tried(here: Here) -> None:
    raise NotHere(f"nothing to try on {here.device.type}")


def figures_of(here: Here, value: float) -> Figures:
    assert torch.are_deterministic_algorithms_enabled()
    return {"value": value}


def test_failures_and_what_was_left_out_are_rows_too(forked_pool: Pool, tmp_path: Path) -> None:
    cases = (
        (Case("figures", figures_of, (2.5,)), GLOO),
        (Case("false", claim_that_is_false), NCCL),
        (Case("not tried", claim_that_cannot_be_tried), GLOO),
        (Case("cards", figures_of, (1.5,)), EVERYWHERE[-1]),
    )
    rows = [
        run_case(forked_pool, case, setup, "cpu", tmp_path / str(number))
        for number, (case, setup) in enumerate(cases)
    ]
    assert [row.result for row in rows] == ["holds", "fails", "left out", "left out"]
    assert rows[0].figures == {"value": 2.5}
    assert rows[1].why == "AssertionError: the device is not CUDA"
    assert "claim_that_is_false" in rows[1].report
    assert rows[2].why == "nothing to try on cpu"
    assert rows[3].why == "the CPU has no cards"
    assert summary(rows) == "1 holds, 1 fails, 2 left out"

    kept, shown = write(rows, "cpu", "make gpu", tmp_path)
    assert (kept.name, shown.name) == ("gpu-cpu.json", "gpu-cpu.md")
    record = json.loads(kept.read_text())
    assert [row["result"] for row in record["rows"]] == [row.result for row in rows]
    assert record["machine"]["device"] == "cpu"
    assert table(rows) in shown.read_text()
    assert "| figures | gloo, 2 ranks, 1 card | holds | value 2.5 |" in shown.read_text()
