"""The loops of docs/rebinding.md, as they are written there: two of three ranks go on after a death."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ddp_pairs import batch
from stalling import outcomes
from worlds import enter
from zero_optim import StalledError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel

PAGE = Path(__file__).parents[1] / "docs" / "rebinding.md"
KILLED_AT, SAVED_AT, STEPS = 5, 3, 7


def loops() -> dict[str, str]:
    """The blocks that catch something, by how state comes back."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    catching = [block for block in blocks if "except" in block]
    return {"checkpoint" if "checkpoint.rebind" in block else "mirrors": block for block in catching}


class Distributed:
    """Stands for torch.distributed: it knows what the loops leave open, who is left."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def init_process_group(self, who_is_left: object) -> None:
        assert who_is_left is ...
        enter(self.folder, "those that are left", self.rank, 2)


def loss_of(model: nn.Module, step: int) -> Tensor:
    if step == KILLED_AT and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    loss: Tensor = model(batch(step, 5, 4)).square().mean()
    return loss


def train(loop: str, way: str, folder: Path) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, mirror=way == "mirrors"
    )
    known = {
        "checkpoint": checkpoint,
        "dist": Distributed(folder, dist.get_rank()),
        "folder": folder / "saved",
    }
    known |= {"model": model, "optimizer": optimizer, "StalledError": StalledError}
    step, went_to = 0, -1
    while step < STEPS:
        if step == SAVED_AT and went_to < 0:
            path = folder / "saved" / "step-3"
            checkpoint.save(path, model=model, optimizer=optimizer, extra=step)
        optimizer.zero_grad()
        known |= {"loss_of": lambda each, step=step: loss_of(each, step), "step": None}
        exec(loop, known)
        if known["step"] is None:
            step += 1
        else:
            step = went_to = known["step"]
    optimizer.wait_for_gathers()
    return went_to, parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("way", ["checkpoint", "mirrors"])
def test_a_loop_of_the_document_goes_on_with_two_of_three_ranks(tmp_path: Path, way: str) -> None:
    ended = outcomes(3, train, loops()[way], way, tmp_path)
    assert [outcome.exitcode for outcome in ended] == [0, 0, -signal.SIGKILL], ended
    (step, first), (other, second), _ = [outcome.said or (None, []) for outcome in ended]
    assert step == other
    assert step in ([SAVED_AT] if way == "checkpoint" else [KILLED_AT - 1, KILLED_AT])
    assert first == second
    assert len(first) == 83


@pytest.mark.parametrize("way", ["checkpoint", "mirrors"])
def test_a_loop_of_the_document_raises_what_is_no_death(way: str) -> None:
    def loss_of(_: object) -> Tensor:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        exec(loops()[way], {"loss_of": loss_of, "model": None, "StalledError": StalledError})
