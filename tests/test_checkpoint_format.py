"""Old files still load. A new version of the format adds a folder here, and changes none."""

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from pool import Pool
from zero_optim import CheckpointError, ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint.manifest import VERSION
from zero_optim.step.averages import EMA

DATA = Path(__file__).parent / "data"


def make() -> tuple[nn.Module, ZeroRedundancyOptimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5, ema_decay=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def write(path: Path) -> None:
    """Save what the committed files hold: on two ranks, numbers that can be told without a computation."""
    model, optimizer, scheduler = make()
    for number, param in enumerate(model.parameters()):
        param.data.copy_(torch.arange(param.numel()).view_as(param) + 10 * number)
        param.grad = torch.zeros_like(param)
    optimizer.step()
    scheduler.step()
    for number, param in enumerate(model.parameters()):
        param.data.copy_(torch.arange(param.numel()).view_as(param) + 10 * number)
        if param in set(optimizer.owned_parameters()):
            optimizer.state[param]["exp_avg"].fill_(number + 0.5)
    checkpoint.save(
        path, model=model, optimizer=optimizer, scheduler=scheduler, extra={"step": 7, "at": (1, 2.5)}
    )


def check(path: Path) -> None:
    model, optimizer, scheduler = make()
    assert checkpoint.load(path, model=model, optimizer=optimizer, scheduler=scheduler) == {
        "step": 7,
        "at": (1, 2.5),
    }
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.5
    owned = set(optimizer.owned_parameters())
    for number, param in enumerate(model.parameters()):
        expected = torch.arange(param.numel(), dtype=torch.float32).view_as(param) + 10 * number
        assert torch.equal(param, expected)
        if param in owned:
            entries = optimizer.state[param]
            assert entries["exp_avg"].unique().tolist() == [number + 0.5]
            assert entries["step"].item() == 1.0
            assert set(entries) == {"step", "exp_avg", "exp_avg_sq", EMA}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_checkpoints_of_every_version_load(pool: Pool, version: int, world_size: int) -> None:
    pool.run(world_size, check, DATA / f"checkpoint-{version}")


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_the_tools_take_checkpoints_of_every_version(
    pool: Pool, tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old = str(DATA / f"checkpoint-{version}")
    assert cli.main(["inspect", old, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["complete"], told["version"], told["world_size"]) == (True, version, 2)
    assert cli.main(["consolidate", old, str(tmp_path / "optimizer.pt")]) == 0
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert state["state"][1]["exp_avg"].tolist() == [1.5, 1.5]
    assert cli.main(["consolidate", old, str(tmp_path / "weights.safetensors")]) == 0
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert weights["0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weights["1.bias"].tolist() == [30, 31]
    assert cli.main(["reshard", old, str(tmp_path / "one"), "--world-size", "1"]) == 0
    assert checkpoint.Reader(tmp_path / "one").manifest.version == VERSION
    pool.run(2, check, tmp_path / "one")


def test_a_version_to_come_is_refused_by_its_number(tmp_path: Path) -> None:
    folder = DATA / f"checkpoint-{VERSION}"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace(f'"version": {VERSION}', f'"version": {VERSION + 1}', 1))
    with pytest.raises(
        CheckpointError, match=f"version {VERSION + 1}, this zero_optim reads up to {VERSION}"
    ):
        checkpoint.Reader(tmp_path)


if __name__ == "__main__":  # python tests/test_checkpoint_format.py: writes the files of a new version
    with Pool() as pool_of_two:
        pool_of_two.run(2, write, DATA / f"checkpoint-{VERSION}")
    sys.exit()
