"""The script for Ray Train of docs/frameworks.md: a worker is killed, and the bits are those of DDP alone."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frameworks import Net, assert_same, samples, whole
from pool import Pool
from waiting import wait_until

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "frameworks.md").read_text()
TRAIN, FIT = re.findall(r"## Ray Train\n.*?```python\n(.*?)\n\n\n(trainer = .*?)```", PAGE, re.DOTALL)[0]
WRAPPERS = {
    1: "ray.train.torch.prepare_model(model)",
    2: 'ShardedDataParallel(model, optimizer, accumulate="local")',
    3: 'FullyShardedDataParallel(model, optimizer, units=[Block], accumulate="local")',
}
KILLED_AT, STEPS = 2, 4  # and one more, on three workers

Weights = dict[str, Tensor]

IMPORTS = """
import torch
from frameworks import Block, Net as Model
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel
"""

OF_RAY = """
import ray.train.torch
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from test_ray import *
from test_ray import batches as undisturbed

def batches(step):
    if (step, dist.get_rank()) == (KILLED_AT, 1) and not mark.exists():
        ray.train.get_all_reported_checkpoints()  # waits until Ray knows of them
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return undisturbed(step)

def fit(trainer):
    try:
        trainer.fit()
    except ControllerError as error:
        if "EADDRINUSE" not in str(error):  # another process took the port that Ray chose for the group
            raise
        fit(trainer)

ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=os.getcwd())
"""


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches for this rank, of two samples each."""
    numbers = [(2 * step + half) * dist.get_world_size() + dist.get_rank() for half in range(2)]
    inputs, targets = samples()
    places = [slice(2 * (number % 12), 2 * (number % 12) + 2) for number in numbers]
    return [(inputs[place], targets[place]) for place in places]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1]) / 2


def keep(model: nn.Module, folder: str, first: int) -> None:
    """Save the weights, and the step at which this group of ranks began."""
    weights = whole(getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model)
    if dist.get_rank() == 0:
        torch.save((weights, first), f"{folder}/{dist.get_world_size()}.pt")


def training(stage: int, folder: Path) -> str:
    """The function of the page, which also keeps what it ends with."""
    train = re.sub(r"ShardedDataParallel\(model, optimizer\).*", WRAPPERS[stage], TRAIN)
    train = train.replace("/shared/runs", str(folder)).replace("lr=3e-4", "lr=0.05").replace("(1.0)", "(0.3)")
    return f'{train}\n    keep(model, "{folder}", first)\n'


def fitting(folder: Path, workers: int, steps: int) -> str:
    """The call of the page."""
    fit = FIT.replace("/shared/runs", str(folder)).replace('"steps": 100', f'"steps": {steps}')
    return fit.replace("num_workers=2", f"num_workers={workers}").replace("trainer.fit()", "fit(trainer)")


def without_ray(stage: int, folder: Path, saved: Path, steps: int) -> None:
    """Run the function of the page on this rank, from a checkpoint, with stand-ins for parts of Ray."""
    torch_part = SimpleNamespace(prepare_model=DistributedDataParallel)
    get = SimpleNamespace(path=str(saved))
    train = SimpleNamespace(torch=torch_part, get_checkpoint=lambda: get, report=lambda *_, **__: None)
    known: dict[str, Any] = {**globals(), "ray": SimpleNamespace(train=train), "Checkpoint": str}
    known["CheckpointUploadMode"] = SimpleNamespace(NO_UPLOAD=None)
    exec(IMPORTS + training(stage, folder), known)
    known["train"]({"steps": steps})


def of_ddp() -> Weights:
    """Train the unsharded model on this rank and the others."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        first, second = batches(step)
        with wrapped.no_sync():
            loss_of(wrapped, first).backward()
        loss_of(wrapped, second).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def processes_in(folder: Path) -> list[int]:
    """The processes that run in a folder or below it."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (path / "cwd").readlink().is_relative_to(folder):
                processes.append(int(path.name))
    return processes


def run(script: str) -> None:
    """Run a script, with Ray on the loopback interface, and end every process that it has started."""
    paths = [TESTS.parent, TESTS, TESTS / "integrations"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "GLOO_SOCKET_IFNAME": "lo"}  # for 127.0.0.1
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    environment |= {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    }
    folder = Path(tempfile.mkdtemp()).resolve()  # its name is short, as Ray's sockets lie there
    (folder / "script.py").write_text(script)
    options: Any = {"capture_output": True, "text": True, "timeout": 800, "cwd": folder, "env": environment}
    try:
        result = subprocess.run([sys.executable, "script.py"], check=False, **options)
        assert result.returncode == 0, (result.stdout + result.stderr)[-20_000:]
        wait_until(lambda: not processes_in(folder))
        assert processes_in(folder) == []
    finally:
        for process in processes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run every stage on two workers, of which one is killed, and the last one on three after it."""
    folders, script = {}, IMPORTS + OF_RAY
    for stage in WRAPPERS:
        folder = folders[stage] = tmp_path_factory.mktemp(f"stage{stage}")
        calls = fitting(folder, 2, STEPS) + (fitting(folder, 3, STEPS + 1) if stage == 3 else "")
        script += f'mark = Path("{folder}/killed")\n{training(stage, folder)}{calls}'
    run(script)
    return folders


@pytest.mark.parametrize("stage", WRAPPERS)
def test_a_run_with_a_death_ends_with_the_bits_of_ddp(
    pool: Pool, folders: dict[int, Path], stage: int
) -> None:
    weights, first = torch.load(folders[stage] / "2.pt")
    assert ((folders[stage] / "killed").exists(), first) == (True, KILLED_AT)
    assert_same(weights, pool.run(2, of_ddp)[0])


def test_a_run_goes_on_with_another_number_of_workers(
    pool: Pool, folders: dict[int, Path], tmp_path: Path
) -> None:
    folder = folders[3]
    pool.run(3, without_ray, 3, tmp_path, folder / "small" / str(STEPS - 1), STEPS + 1)
    weights, first = torch.load(folder / "3.pt")
    assert first == STEPS
    assert_same(weights, torch.load(tmp_path / "3.pt")[0])
    assert {path.name for path in (folder / "small").glob("[0-9]*")} == {str(STEPS - 1), str(STEPS)}
