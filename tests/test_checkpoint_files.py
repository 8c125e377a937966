"""Data files of checkpoints are safetensors files, which others can read without this library."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import cuts
from cuts import ONE_A_BUCKET, cutting
from pool import Pool, on_ranks
from test_checkpoint import Run, flip
from zero_optim import CheckpointError, ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint import manifest
from zero_optim.checkpoint.manifest import VERSION
from zero_optim.plan import plan
from zero_optim.step.averages import EMA


def saved_run(path: Path) -> dict[str, Tensor]:
    run = Run()
    run.train(2)
    run.save(path)
    return {name: t for name, t in run.model.state_dict().items() if isinstance(t, Tensor)}


def read_by_others(folder: Path) -> dict[str, Tensor]:
    """Read all data files of a folder with safetensors' own reader."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("data-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no dict
    return found


@on_ranks(2)
def test_each_ranks_file_is_read_by_safetensors_under_the_checkpoints_keys(tmp_path: Path) -> None:
    weights = saved_run(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("data-*"))) == 2
    found = read_by_others(tmp_path / "one")
    assert found.keys() == manifest.read(tmp_path / "one").entries.keys()
    assert weights.keys() >= {"scale", "head.weight"}
    for name, tensor in weights.items():
        if f"model/{name}" in found:  # tied weights are written once
            assert torch.equal(found[f"model/{name}"], tensor)
    assert "model/scale" in found
    assert "optimizer/state/scale/exp_avg" in found


class Odd(nn.Module):
    """Buffers of dtypes of many sizes, one of which safetensors has no name for, some without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bytes_", torch.arange(3, dtype=torch.uint8))
        self.register_buffer("large", torch.tensor([[1 + 2j, 3j]], dtype=torch.complex128))
        self.register_buffer("short_", torch.tensor([1.5], dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(2, 0))
        self.register_buffer("number", torch.tensor(5))


@on_ranks(1)
def test_a_dtype_unknown_to_safetensors_is_bytes_there_and_itself_here(tmp_path: Path) -> None:
    model, other = Odd(), Odd()
    checkpoint.save(tmp_path, model=model)
    for buffer in other.buffers():
        buffer.zero_()
    checkpoint.load(tmp_path, model=other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    found = read_by_others(tmp_path)
    assert found["model/large"].shape == (1, 2, 16)
    assert found["model/large"].view(torch.complex128).flatten().tolist() == [1 + 2j, 3j]
    (path,) = tmp_path.glob("data-*")
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "dtype of model/large": "complex128"}
    assert cli.main(["inspect", str(tmp_path)]) == 0


@on_ranks(1)
def test_a_load_compares_every_byte_of_the_headers_it_reads(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path)
    (data,), head = tmp_path.glob("data-*"), tmp_path / "manifest.json"
    places = [(head, place) for place in range(len(head.read_bytes().splitlines()[0]) + 1)]
    places += [(data, place) for place in range(0, int.from_bytes(data.read_bytes()[:8], "little") + 8, 7)]
    for file, place in places:
        flip(file, place)
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
        flip(file, place)
    flip(data, 20)
    with pytest.raises(CheckpointError, match="its header in data-"):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
    flip(data, 20)
    checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


# ---------------------- versions of the format


KEPT = Path(__file__).parent / "data" / f"checkpoint-{VERSION}"


def make(
    cut: bool = False,
) -> tuple[nn.Module, ZeroRedundancyOptimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.MonkeyPatch.context() as patch, cutting() if cut else nullcontext():
        patch.setattr(cuts, "ALIGNMENT", 4)
        patch.setattr(plan, "ALIGNMENT_NBYTES", 4)
        capacity = {"bucket_cap_mb": ONE_A_BUCKET} if cut else {}
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.5, ema_decay=0.5, **capacity
        )
    assert len(optimizer.pieces()[model[0].weight]) == 1 + cut
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def write_kept(path: Path) -> None:
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


def check(path: Path, cut: bool = False) -> None:
    model, optimizer, scheduler = make(cut)
    assert checkpoint.load(path, model=model, optimizer=optimizer, scheduler=scheduler) == {
        "step": 7,
        "at": (1, 2.5),
    }
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    for number, param in enumerate(model.parameters()):
        expected = torch.arange(param.numel(), dtype=torch.float32).view_as(param) + 10 * number
        assert torch.equal(param, expected)
        entries = state[number]
        assert entries["exp_avg"].unique().tolist() == [number + 0.5]
        assert entries["exp_avg"].shape == entries[EMA].shape == param.shape
        assert entries["step"].item() == 1.0
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq", EMA}


@pytest.mark.parametrize(("world_size", "cut"), [(1, False), (2, True)])
def test_a_checkpoint_of_the_repository_loads(pool: Pool, world_size: int, cut: bool) -> None:
    pool.run(world_size, check, KEPT, cut)


def test_the_tools_take_a_checkpoint_of_the_repository(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = str(KEPT)
    assert cli.main(["inspect", old, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["complete"], told["version"], told["world_size"]) == (True, VERSION, 2)
    assert cli.main(["consolidate", old, str(tmp_path / "optimizer.pt")]) == 0
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert state["state"][1]["exp_avg"].tolist() == [1.5, 1.5]
    assert cli.main(["consolidate", old, str(tmp_path / "weights.safetensors")]) == 0
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert weights["0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weights["1.bias"].tolist() == [30, 31]
    assert cli.main(["convert", old, str(tmp_path / "one"), "--to", "zero-optim"]) == 0
    assert "bytes in 2 files\n" in capsys.readouterr().out
    pool.run(2, check, tmp_path / "one")


def test_a_checkpoint_of_another_version_is_refused_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = VERSION + 1
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace(f'"version": {VERSION}', f'"version": {version}', 1))
    words = f"its format has version {version}, and this zero_optim reads version {VERSION}: read it with"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.peek(tmp_path)
    assert checkpoint.latest(tmp_path) is None
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert words in capsys.readouterr().out


if __name__ == "__main__":  # python tests/test_checkpoint_files.py: writes the files
    with Pool() as pool_of_two:
        pool_of_two.run(2, write_kept, KEPT)
    sys.exit()
