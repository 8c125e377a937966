"""The GPU suite, on the CPU: its cases run, and what comes out is told as it is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_optim
from gpu import costs
from gpu.cases import EVERYWHERE, GLOO, NCCL, Case, all_cases
from gpu.costs import training, waits_for_events
from gpu.running import run_all, run_case, summary, table, write
from gpu.setting import Figures, Here, NotHere
from on_device import on_device
from pool import Pool
from sync_calls import Event, cpu_as_accelerator
from zero_optim.compat.streams import HostCopy

# One of each kind; the others are slow tests.
QUICK = (
    "start: no backend, no set_device",
    "table: packed | convolutions | scheduled | foreach",
    "table: packed | tower | GradScaler | fused, one bucket",
    "table: gradients | unused | clipped | momentum, averages",
    "kernels: AdamW fused, cut by rows, float32",
    "table: our DDP alone | unused | ordinary | gradients as views",
    "table: overlap | tower | ordinary | plain",
    "table: lazy | tower | GradScaler | plain, autocast",
    "parameters: checkpointing, not reentrant, bf16",
    "table: fully | tied | ordinary | static graph",
    "table: fully | tower | ordinary | mesh",
    "memory: gradients",  # the others import FSDP2, which takes seconds
    "bucketer: 2 streams",
    "table: overlap, owners | convolutions | scheduled | plain",
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


def test_every_row_has_a_name_of_its_own() -> None:
    rows = [(case.name, setup.name) for case in all_cases() for setup in case.setups]
    assert len(set(rows)) == len(rows)


LACKING = """
import sys
sys.modules |= dict.fromkeys(("hypothesis", "matplotlib", "nbformat", "rich", "torch_optimizer"))
from gpu.cases import all_cases
assert all_cases()
"""


@pytest.mark.slow
def test_the_cases_need_pytorch_numpy_and_pytest_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LACKING], cwd=Path(__file__).parent, check=False, timeout=600
    )
    assert done.returncode == 0


def test_what_a_test_makes_is_on_its_device_and_what_the_library_makes_is_not() -> None:
    by_the_library = compile("torch.ones(2)", zero_optim.__file__, "eval")
    with on_device(torch.device("meta")):
        made = torch.ones(2, requires_grad=True)
        assert made.is_meta
        assert made.is_leaf
        assert made.requires_grad
        assert all(param.is_meta for param in nn.Linear(2, 2).parameters())
        assert not torch.ones(2, device="cpu").is_meta
        assert not eval(by_the_library).is_meta
    assert not torch.ones(2).is_meta


def test_the_count_of_waits_sees_those_of_the_library() -> None:
    weight = torch.ones(3, requires_grad=True)
    with cpu_as_accelerator(), waits_for_events(Event) as found:
        copy = HostCopy(weight)
        weight.sum().backward()
        copy.read()  # of an earlier pass
        assert found == []
        HostCopy(weight).read()
        HostCopy(weight, weight).read()
    assert len(found) == 2
    assert {where.partition(":")[0] for where in found} == {"test_gpu_suite.py"}


def waiting_training(here: Here, kind: str, clips: bool) -> Callable[[], None]:
    iterate = training(here, kind, clips)

    def iterate_and_wait() -> None:
        iterate()
        HostCopy(torch.ones(1, device=here.device)).read()

    return iterate_and_wait


def claim_without_waits_where_there_is_one(here: Here) -> None:
    with patch.object(costs, "training", waiting_training):
        costs.synchronizations(here, "optimizer", clips=False, most=0, world=1)


def test_an_iteration_that_waits_for_a_copy_fails_the_case_that_counts(
    forked_pool: Pool, tmp_path: Path
) -> None:
    case = Case("waits", claim_without_waits_where_there_is_one)
    row = run_case(forked_pool, case, NCCL, "cpu", tmp_path)
    assert row.result == "fails"
    assert "2 waits in two iterations, at test_gpu_suite.py:" in row.why


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
