"""Tools on checkpoints, in one process: consolidated, converted, inspected, with bounded memory."""

import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import Ranks, on_ranks
from test_checkpoint import Run, flip
from training import assert_same_bits, assert_same_state, assert_same_value, make_params, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint import offline
from zero_optim.checkpoint.content import RankContent
from zero_optim.errors import CheckpointError


def saved(path: Path) -> dict[str, Any]:
    """Save a run, and give what is in it: weights and the consolidated state."""
    run = Run(cut=True)
    run.train(3)
    run.save(path)
    run.optimizer.consolidate_state_dict(to=None)
    return {"weights": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def test_a_checkpoint_is_inspected_and_becomes_a_file_of_torch_optim_and_of_weights(
    ranks2: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ranks2.run(saved, tmp_path / "one")[0]
    assert cli.main(["consolidate", str(tmp_path / "one"), str(tmp_path / "optimizer.pt")]) == 0
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    names = state["param_groups"][0].pop("param_names")
    assert names[:2] == ["scale", "frozen"]
    assert_same_state(state, expected["optimizer"])
    plain = torch.optim.AdamW(twin([expected["weights"][name] for name in names]))
    plain.load_state_dict(state)
    for out in ("weights.pt", "weights.safetensors"):
        assert cli.main(["consolidate", str(tmp_path / "one"), str(tmp_path / out), "--weights"]) == 0
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert_same_value(dict(weights), dict(expected["weights"]))
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load_file(tmp_path / "weights.safetensors")
    for name, tensor in weights.items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(loaded[name], tensor)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "optimizer.pt", "weights.pt", "weights.safetensors",
    ]  # fmt: skip
    size = (tmp_path / "optimizer.pt").stat().st_size
    assert f"wrote {tmp_path / 'optimizer.pt'}: {size:,} bytes\n" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "one"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["complete"], told["world_size"], told["version"]) == (True, 2, 2)
    assert told["software"]["torch"] == torch.__version__
    sections = {section["name"]: section for section in told["sections"]}
    assert sections.keys() == {"extra", "model", "optimizer", "random", "scheduler"}
    assert sections["optimizer"]["num_tensors"] == 3 * 6  # two moments and a step of each trained parameter
    flip(next((tmp_path / "one").glob("data-*-1.safetensors")))
    assert cli.main(["inspect", str(tmp_path / "one")]) == 1
    assert "complete    no: " in capsys.readouterr().out
    (tmp_path / "one" / "manifest.json").unlink()
    assert cli.main(["inspect", str(tmp_path / "one"), "--json"]) == 1
    assert "never completed" in json.loads(capsys.readouterr().out)["reason"]


@on_ranks(2)
def test_files_of_pytorchs_zero_optimizer_come_in_and_go_back(tmp_path: Path) -> None:
    with warnings.catch_warnings():  # importing it scripts functions, which PyTorch itself deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    params = make_params()
    theirs = TorchZero(params, torch.optim.AdamW, lr=0.01)
    for step in range(2):
        set_grads(params, step)
        theirs.step()
    theirs.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
        offline.convert(tmp_path / "theirs.pt", tmp_path / "ours", "zero-optim")
        offline.consolidate(tmp_path / "ours", tmp_path / "back.pt")
        assert_same_state(torch.load(tmp_path / "back.pt", weights_only=True), theirs.state_dict())
    dist.barrier()
    mine = twin(params)
    names = [f"block.{index}" for index in range(len(mine))]
    ours = ZeroRedundancyOptimizer(list(zip(names, mine, strict=True)), torch.optim.AdamW, lr=0.5)
    checkpoint.load(tmp_path / "ours", optimizer=ours)
    for step in range(2, 4):
        for optimizer, own in ((theirs, params), (ours, mine)):
            set_grads(own, step)
            optimizer.step()
    assert_same_bits(mine, params)


def save_wide(path: Path) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    checkpoint.save(path, model=model)
    return dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants because weights_only=True")  # of 2.14
def test_tensors_of_any_layout_are_consolidated_and_nothing_else_is_left(
    ranks1: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ranks1.run(save_wide, tmp_path / "one")[0]
    offline.consolidate(tmp_path / "one", tmp_path / "out.pt", weights=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out.pt"]
    for name, tensor in weights.items():
        assert torch.equal(loaded[name].to_dense(), tensor.to_dense())
        if not tensor.is_sparse:
            assert loaded[name].stride() == tensor.stride()
            assert loaded[name].untyped_storage().nbytes() == tensor.nbytes
    assert cli.main(["consolidate", str(tmp_path / "one"), str(tmp_path / "out.safetensors")]) == 2
    assert "sparse is no plain tensor" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_parts_of_a_larger_tensor_come_in_as_tensors_of_their_own(tmp_path: Path) -> None:
    large = torch.arange(100.0)
    parts = {"run": large[10:20], "columns": large.view(10, 10)[:, 2:4], "every": large[::2]}
    torch.save(parts, tmp_path / "parts.pt")
    offline.convert(tmp_path / "parts.pt", tmp_path / "ours", "zero-optim")
    offline.consolidate(tmp_path / "ours", tmp_path / "back.pt", weights=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    for name, tensor in parts.items():
        assert torch.equal(back[name], tensor)
        assert back[name].untyped_storage().nbytes() == tensor.nbytes


def test_more_tensors_are_consolidated_than_a_process_may_have_open_files(tmp_path: Path) -> None:
    weights = {f"block.{number}": torch.full((40, 40), float(number)) for number in range(300)}
    torch.save(weights, tmp_path / "theirs.pt")
    offline.convert(tmp_path / "theirs.pt", tmp_path / "ours", "zero-optim")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        offline.consolidate(tmp_path / "ours", tmp_path / "back.pt", weights=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same_bits(list(back.values()), list(weights.values()))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((offline, "complete"), "cannot write {out}: ArithmeticError: on purpose"),
        ((offline, "write_tensors"), "cannot write {out}: ArithmeticError: on purpose"),
        ((RankContent, "bytes_of"), "the checkpoint {source} is damaged or foreign: ArithmeticError"),
    ],
    ids=["completing", "writing", "reading"],
)
def test_an_error_names_the_source_that_was_read_or_the_target_that_was_written(
    place: tuple[Any, str], expected: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "weights.pt", tmp_path / "ours"
    torch.save(nn.Linear(2, 2).state_dict(), source)
    fails = mock.patch.object(*place, side_effect=ArithmeticError("on purpose"))
    with fails, pytest.raises(CheckpointError, match=expected.format(source=source, out=out)):
        offline.convert(source, out, "zero-optim")
    assert not checkpoint.latest(out)


GROWTH = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from process_memory import growth, least_growth
from zero_optim.checkpoint import offline

def tour(source, out):
    return [
        growth(offline.convert, Path(source), Path(out + "-r"), "zero-optim"),
        growth(offline.consolidate, Path(out + "-r"), Path(out + ".pt")),
        growth(offline.consolidate, Path(out + "-r"), Path(out + ".safetensors")),
        growth(offline.convert, Path(out + ".pt"), Path(out + "-i"), "zero-optim"),
        growth(offline.inspect, Path(out + "-i")),
    ]

print(least_growth(tour, sys.argv[1], sys.argv[2]))
"""


@pytest.mark.slow
def test_tools_hold_one_tensor_at_a_time(ranks2: Ranks, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("memory is measured as Linux tells it")
    ranks2.run(save_large, tmp_path / "small", 16)
    ranks2.run(save_large, tmp_path / "large", 2048)  # 30 tensors of 8 MiB
    script = GROWTH.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    # MiB: two pieces of a file, and what the heap likes to keep; far from the 120 of one rank's file.
    assert float(done.stdout) <= 16 + 64


def save_large(path: Path, width: int) -> None:
    model = nn.ParameterList(torch.zeros(width, 1024) + index for index in range(10))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    checkpoint.save(path, model=model, optimizer=optimizer)
