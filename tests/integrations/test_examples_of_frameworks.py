"""The examples for frameworks run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def run(folder: Path, options: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(CHECKOUT / "examples" / "lightning_zero2.py"), "--accelerator", "cpu"]
    command += options.split()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "lightning_zero2.ckpt").exists()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_example_of_lightning_trains_and_goes_on_with_another_number_of_ranks(
    tmp_path: Path, strategy: str
) -> None:
    run(tmp_path, f"--epochs 1 --strategy {strategy}")
    run(tmp_path, f"--epochs 2 --strategy {strategy} --devices 1 --resume lightning_zero2.ckpt")
