"""The GPU suite, on the CPU: its cases run, and what comes out is told as it is."""

import json
from pathlib import Path
from unittest import mock

import pytest

from gpu.cases import SECTIONS, Case, all_cases
from gpu.running import Place, Record, Row, run_all
from gpu.setting import Setup
from pool import Pool

# One of each kind; the others are slow tests.
QUICK = (
    "versions",
    "private names",
    "late loopback of 8: ZeRO-2",
    "late loopback of 8: zero_step",
    "late loopback of 8: ZeRO-1, a missing wait is seen",
    "costs of a rank of 8: host ms / GPU ms / peak MiB",
    "trace: ZeRO-3",
    "raw collectives",
    "kernels: AdamW fused, cut by rows, float32",
    "kernels: rows added in the order of ranks, bfloat16",
    "table: overlap | tower | ordinary | plain",
    "parameters: checkpointing, not reentrant, bf16",
    "overlap: several streams",
    "checkpoint: save_async, on one rank",
    "waits: zero_step, pretended group of 2",
    "speed: an iteration, small",
)


def check(pool: Pool, names: set[str], folder: Path) -> None:
    cases = [case for case in all_cases() if case.name in names]
    assert names
    assert {case.name for case in cases} == names
    rows = list(run_all(pool, cases, Place("cpu", folder, folder / "kept")))
    for row in rows:
        assert row.result != "fails", (row.name, row.setup, row.report)
    # What the CPU leaves out is known; a case that nobody can run would not be noticed otherwise.
    reasons = {row.why for row in rows if row.result == "left out"}
    assert reasons <= {
        "the CPU has no cards",
        "the CPU takes no device_id",
        "the CPU captures nothing",
        "the CPU would write to memory that was freed",
        "this PyTorch does not have torch.optim.Muon",
        "nothing narrower than float32 is cut on the CPU",
    }


@pytest.mark.slow
def test_cases_of_each_kind_run_on_the_cpu(pool: Pool, tmp_path: Path) -> None:
    check(pool, set(QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_case_runs_on_the_cpu(pool: Pool, tmp_path: Path) -> None:
    check(pool, {case.name for case in all_cases()} - set(QUICK), tmp_path)


def test_a_run_that_is_cut_leaves_the_rows_that_it_had(tmp_path: Path) -> None:
    record = Record("cpu", "python -m gpu", tmp_path)
    record.add(Row("one", "gloo", "holds", {"ms": 1.5}, seconds=2.0))
    machine, row = map(json.loads, (tmp_path / "gpu-cpu.jsonl").read_text().splitlines())
    assert machine["machine"]["device"] == "cpu"
    assert (row["case"], row["figures"]) == ("one", {"ms": 1.5})


def test_on_a_gpu_the_rest_of_a_section_is_left_out_once_its_time_is_over(tmp_path: Path) -> None:
    case = Case("slow", print, section="trace", setups=(Setup("gloo", "gloo", 1),) * 3)
    ran = Row("slow", "gloo", "holds", {}, seconds=SECTIONS["trace"] + 1)
    with mock.patch("gpu.running.run_case", return_value=ran):
        rows = list(run_all(mock.Mock(), [case], Place("cuda", tmp_path)))
    assert [row.result for row in rows] == ["holds", "left out", "left out"]
    assert sum(SECTIONS.values()) <= 720


def test_cases_come_in_the_order_of_their_sections() -> None:
    sections = [case.section for case in all_cases()]
    assert list(dict.fromkeys(sections)) == list(SECTIONS)
