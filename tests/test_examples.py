"""The examples train, resume on another number of ranks, and do the same at every stage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import muon
import muon_fsdp2
import pytest
import torch
import train_gpt

from pool import Pool
from training import needs_muon

CHECKOUT = Path(__file__).parents[1]
EXAMPLES = CHECKOUT / "examples"
TINY = "--layers 1 --width 16 --heads 2 --context 16 --batch-size 12 --warmup 2 --log-every 1 --eval-every 2"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def losses(run: Path, options: str = "--steps 6") -> list[float]:
    """Train on this rank; returns the losses of training, then of validation, from the first update on."""
    args = train_gpt.parse([*TINY.split(), *options.split(), "--run", str(run)])
    trainer = train_gpt.Trainer(args, torch.device("cpu"))
    trainer.train()
    return [loss for _, loss in [*trainer.losses, *trainer.validations]]


def test_every_stage_of_train_gpt_has_the_same_losses(pool: Pool, tmp_path: Path) -> None:
    options = "--steps 6 --accumulate 2 --clip 0.1"
    plain, other = pool.run(2, losses, tmp_path / "none", f"--stage 0 {options}")
    assert plain == other
    assert plain[5] < plain[0]
    for stage in (1, 2, 3):
        got = pool.run(2, losses, tmp_path / str(stage), f"--stage {stage} {options}")
        assert got == [pytest.approx(plain, rel=1e-6)] * 2


def test_train_gpt_goes_on_at_another_stage_and_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    (whole, _) = pool.run(2, losses, tmp_path / "whole")
    for part, (stage, ranks, steps) in enumerate([(1, 2, 2), (3, 3, 4), (2, 1, 6)]):
        options = f"--stage {stage} --steps {steps} --save-every 1"
        parts = pool.run(ranks, losses, tmp_path / "parts", options)
        assert len(parts[0]) == steps + part + 2
    # The schedule of the parts ends with each, so that their first two updates alone are those of the whole.
    assert parts[0][:2] == pytest.approx(whole[:2], rel=1e-5)
    assert parts[0][5] < parts[0][1]


@pytest.mark.slow
@needs_muon
def test_muon_and_adamw_train_in_one_optimizer(pool: Pool) -> None:
    first, second = pool.run(2, muon.train, 20, torch.device("cpu"))
    assert first == second
    assert first[-1] < 0.95 * first[0]


def sorted_by_fsdp2(folder: Path, steps: int) -> list[float]:
    return muon_fsdp2.train(steps, torch.device("cpu"), folder / "saved")


@pytest.mark.slow
@needs_muon
@pytest.mark.filterwarnings("ignore", "error:::zero_optim")
def test_muon_trains_a_model_of_fsdp2_and_goes_on_from_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, sorted_by_fsdp2, tmp_path, 15)
    assert first == second
    assert first[-1] < 0.95 * first[0]
    (again, *_) = pool.run(3, sorted_by_fsdp2, tmp_path, 2)
    assert again[0] < 0.95 * first[0]


def started(command: list[str], folder: Path) -> str:
    """What a command shows that ends well."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_gpt_runs_under_torchrun_and_goes_on_in_one_process(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "train_gpt.py"), *TINY.split(), "--stage", "2"]
    shown = started([*TORCHRUN, *script, "--steps", "4"], tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert "ranks     2 (cpu, gloo)" in shown
    assert f"runs/{run.name}, from update 0 to 4" in shown
    assert shown.count("validation") == 3
    assert "balance: fullest rank / mean" in shown
    assert {path.name for path in run.iterdir()} == {"000004", "loss.png"}
    shown = started([sys.executable, *script, "--steps", "6", "--run", str(run)], tmp_path)
    assert "ranks     1 (cpu, gloo)" in shown
    assert "from update 4 to 6" in shown
    assert {path.name for path in run.iterdir()} == {"000004", "000006", "loss.png"}


@pytest.mark.slow
def test_the_script_of_the_readme_runs_under_torchrun_and_resumes(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (CHECKOUT / "README.md").read_text(), re.DOTALL)
    assert code[1].count("\n") <= 30
    (tmp_path / "train.py").write_text(code[1])
    started([*TORCHRUN, "train.py"], tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"2", "3"}
    (tmp_path / "train.py").write_text(code[1].replace("epoch < 3", "epoch < 4"))
    started([*TORCHRUN[:-1], "1", "train.py"], tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"3", "4"}


def test_each_example_is_named_in_its_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {name for name in names if f"[{name}]({name})" in text}
