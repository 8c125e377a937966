"""The scripts of docs/migrating.md run as they are written there; both sides end with the same weights."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from frameworks import as_torchrun_says
from fully import Tower, batch, whole
from pool import on_ranks
from training import TORCH, LoRA
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import ShardedDataParallel, fully_shard

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(# .*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.DOTALL)
LEFT = {"DDP": "", "FSDP2": "", "DeepSpeed": "deepspeed", "FairScale": "fairscale"}  # and its package
RECIPES = {title: block for block in BLOCKS if (title := block.splitlines()[0].partition(": ")[2])}

# torch.distributed.checkpoint imports what PyTorch deprecates, and frameworks warn of this and that.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::zero_optim")


def pair(name: str) -> tuple[str, str]:
    """The scripts of the left side and of the right one."""
    at = next(index for index, block in enumerate(BLOCKS) if block.startswith(f"# {name}\n"))
    assert BLOCKS[at + 1].startswith("# zero_optim\n")
    return BLOCKS[at], BLOCKS[at + 1]


def without_clipping(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if "clip" not in line)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float().square().mean()


def names(path: Path) -> dict[str, Any]:
    """What the scripts of the right side leave open."""
    model = Tower()  # sets a seed
    known: dict[str, Any] = {}
    known |= {"ZeroRedundancyOptimizer": ZeroRedundancyOptimizer, "ShardedDataParallel": ShardedDataParallel}
    known |= {"fully_shard": fully_shard, "checkpoint": checkpoint, "AdamW": AdamW, "LoRA": LoRA}
    known |= {"torch": torch, "dist": dist, "path": path, "loss_of": loss_of, "nullcontext": nullcontext}
    return {**known, "model": model, "batches": [batch(step) for step in range(4)]}


def names_of_others(name: str, path: Path) -> dict[str, Any]:
    """Likewise of the left side."""
    known = {**names(path), "DistributedDataParallel": DistributedDataParallel, "fully_shard": fsdp2}
    known |= {"clip_grad_norm_": clip_grad_norm_, "dcp": dcp, "get_state_dict": get_state_dict}
    if name == "DeepSpeed":
        known["deepspeed"] = deepspeed = import_module("deepspeed")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
    if name == "FairScale":
        known["OSS"] = import_module("fairscale.optim").OSS
        known["ShardedDataParallel"] = import_module("fairscale.nn").ShardedDataParallel
    return known


def weights(model: Any) -> list[Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in whole(model)]


@on_ranks(2)
@pytest.mark.parametrize("name", LEFT)
def test_both_scripts_of_a_pair_end_with_the_same_weights(name: str, tmp_path: Path) -> None:
    # They add up the norm in another order.
    adds_otherwise = name in ("FSDP2", "FairScale")
    left, right = (without_clipping(script) if adds_otherwise else script for script in pair(name))
    (tmp_path / "ours").mkdir(exist_ok=True)
    (tmp_path / "theirs").mkdir(exist_ok=True)
    ours = names(tmp_path / "ours")
    exec(right, ours)
    code = compile(left, name, "exec")
    if LEFT[name] and not find_spec(LEFT[name]):
        return
    theirs = names_of_others(name, tmp_path / "theirs")
    with as_torchrun_says():
        exec(code, theirs)
    # FSDP2 of 2.8 rounds otherwise than its DDP; on some processors DeepSpeed's norm has another last bit.
    near = {"FSDP2": 1e-5 if TORCH == (2, 8) else 0, "DeepSpeed": 1e-7}.get(name, 0)
    for got, want in zip(weights(ours["model"]), weights(theirs["model"]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=near)
    if name == "FairScale":
        dist.barrier()
        state = torch.load(tmp_path / "theirs" / "optimizer.pt", weights_only=False)
        ours["optimizer"].load_state_dict(state)


PREAMBLE = """
import os, signal, sys
import torch.distributed as dist

sys.path.insert(0, {tests!r})
from test_migrating import *

torch.set_num_threads(1)
dist.init_process_group("gloo")
globals().update(names({path!r}))
starts, plain_loss = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), loss_of


def loss_of(model, inputs):
    if (starts, dist.get_rank(), step) == (0, {victim}, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_loss(model, inputs)


"""
CLOSING = """
if dist.get_rank() == 0:
    torch.save([starts, weights(model)], {path!r} + "/end.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_a_job_again_that_ends_with_the_bits_of_one_without_a_death(tmp_path: Path) -> None:
    ends = []
    for victim in (-1, 1):
        folder = tmp_path / str(victim)
        folder.mkdir()
        about = {"tests": str(ROOT / "tests"), "path": str(folder), "victim": victim}
        script = PREAMBLE.format(**about) + RECIPES["restart"] + CLOSING.format(**about)
        (folder / "train.py").write_text(script)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the page says
        command = [*torchrun, "--max-restarts", "1", str(folder / "train.py")]
        options: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stderr
        ends.append(torch.load(folder / "end.pt"))
    assert [starts for starts, _ in ends] == [0, 1]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))
