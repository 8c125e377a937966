"""Checkpoints of other libraries come in and go out, offline; training goes on bit for bit on both sides."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from cuts import ONE_A_BUCKET, cutting
from fully import Tower
from pool import Ranks, on_ranks
from test_checkpoint import Run, once
from training import assert_same_bits, assert_same_state
from zero_optim import ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint import offline

pytestmark = pytest.mark.filterwarnings("ignore", "error:::zero_optim")  # DCP imports what PyTorch deprecates
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(Tower):
    """With buffers of several dtypes, and a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__(width=10, depth=1)
        self.norm = nn.BatchNorm1d(3)
        self.last.bias.requires_grad_(False)


def groups_of(model: nn.Module, named: bool = False) -> Any:
    """Two groups with different options."""
    matrices = [(name, param) for name, param in model.named_parameters() if param.ndim > 1]
    rest = [(name, param) for name, param in model.named_parameters() if param.ndim <= 1]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    if named:
        return groups
    return [{**group, "params": [param for _, param in group["params"]]} for group in groups]  # type: ignore[attr-defined]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    """Step with fixed gradients, which do not depend on the order of parameters; returns the weights."""
    for step in steps:
        for number, param in enumerate(model.parameters()):
            whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + number))
            if isinstance(param, DTensor):
                whole = distribute_tensor(whole, param.device_mesh, param.placements)
            param.grad = whole if param.requires_grad else None
        optimizer.step()
    tensors = (tensor.detach() for tensor in model.state_dict().values())
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in tensors]


def ours(cut: bool = False, model: nn.Module | None = None) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = model or Model()
    if not cut:
        return model, ZeroRedundancyOptimizer(groups_of(model), AdamW, lr=0.01)
    with cutting():
        optimizer = ZeroRedundancyOptimizer(groups_of(model), AdamW, lr=0.01, bucket_cap_mb=ONE_A_BUCKET)
    assert any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return model, optimizer


def fsdp() -> tuple[Any, Any]:
    model = Model()
    fsdp2(model)
    return model, AdamW(groups_of(model), lr=0.01)


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_what_fsdp2_saved_comes_in_and_training_goes_on(tmp_path: Path, flat: bool) -> None:
    model, optimizer = fsdp()
    train(model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    saved = {"model": weights, "optim": state, "step": 2, "lr_scheduler": {"last_epoch": 2}}
    dcp.save({"app": saved} if flat else saved, checkpoint_id=tmp_path / "theirs")
    once(lambda: offline.convert(tmp_path / "theirs", tmp_path / "ours", "zero-optim"))
    other, own = ours()
    scheduler = torch.optim.lr_scheduler.ConstantLR(own)
    extra = checkpoint.load(tmp_path / "ours", model=other, optimizer=own, scheduler=scheduler)
    assert extra == {"step": 2}
    assert scheduler.last_epoch == 2
    assert own.param_groups[1]["weight_decay"] == 0.0
    assert_same_bits(train(other, own, range(2, 4)), train(model, optimizer, range(2, 4)))


@on_ranks(2)
@pytest.mark.parametrize("cut", [False, True])
def test_fsdp2_loads_what_is_converted_and_goes_on_and_what_it_saves_is_the_same(
    tmp_path: Path, cut: bool
) -> None:
    model, optimizer = ours(cut)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "ours", model=model, optimizer=optimizer, extra={"step": 2})
    whole = tmp_path / "whole.pt"
    once(lambda: offline.convert(tmp_path / "ours", whole, "torch-names"))
    once(lambda: torch_save_to_dcp(whole, tmp_path / "theirs"))
    other, plain = fsdp()
    weights, state = get_state_dict(other, plain)
    saved = {"model": weights, "optimizer": state, "extra": {"step": 0}}
    dcp.load(saved, checkpoint_id=tmp_path / "theirs")
    assert saved["extra"]["step"] == 2
    set_state_dict(other, plain, model_state_dict=weights, optim_state_dict=state)
    dcp.save(saved, checkpoint_id=tmp_path / "back")
    once(lambda: offline.convert(tmp_path / "back", tmp_path / "again", "zero-optim"))
    back, own = ours(not cut)
    assert checkpoint.load(tmp_path / "again", model=back, optimizer=own) == {"step": 2}
    expected = train(model, optimizer, range(2, 4))
    assert_same_bits(train(other, plain, range(2, 4)), expected)
    assert_same_bits(train(back, own, range(2, 4)), expected)


@on_ranks(2)
def test_a_file_of_torch_optim_by_index_and_by_name_goes_out_and_comes_back(tmp_path: Path) -> None:
    run = Run(cut=True)
    run.train(3)
    run.save(tmp_path / "ours")

    def there_and_back() -> None:
        for form in ("torch", "torch-names"):
            offline.convert(tmp_path / "ours", tmp_path / f"{form}.pt", form)
            offline.convert(tmp_path / f"{form}.pt", tmp_path / form, "zero-optim")
        offline.convert(tmp_path / "torch.pt", tmp_path / "last.pt", "torch-names")
        offline.convert(tmp_path / "last.pt", tmp_path / "last", "zero-optim")
        first, last = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("torch-names", "last"))
        assert_same_state(last["optimizer"], first["optimizer"])
        assert first.keys() == last.keys() == {"model", "optimizer", "scheduler", "extra"}

    once(there_and_back)
    run.train(5)
    for folder in ("torch", "torch-names", "last"):
        again = Run()
        again.load(tmp_path / folder)
        again.train(5)
        assert_same_bits(again.bits(), run.bits())


@on_ranks(2)
@pytest.mark.parametrize("form", ["index", "param_names", "names", "flat"])
def test_all_forms_of_an_optimizers_state_dict_come_in(tmp_path: Path, form: str) -> None:
    model = Model()
    theirs = AdamW(groups_of(model, named=form == "param_names"), lr=0.01)
    train(model, theirs, range(2))
    state: Any = theirs.state_dict()
    if form in ("names", "flat"):
        state = get_optimizer_state_dict(model, theirs, options=FLAT if form == "flat" else None)

    def come_in() -> None:
        parts = {"model_state_dict": model.state_dict(), "optimizer_state_dict": state}
        torch.save({**parts, "epoch": 3, "random": {"seed": 4}}, tmp_path / "theirs.pt")
        command = ["convert", str(tmp_path / "theirs.pt"), str(tmp_path / "ours"), "--to", "zero-optim"]
        assert cli.main(command) == 0

    once(come_in)
    other, own = ours()
    extra = checkpoint.load(tmp_path / "ours", model=other, optimizer=own)
    assert extra == {"epoch": 3, "random": {"seed": 4}}
    assert_same_bits(train(other, own, range(2, 4)), train(model, theirs, range(2, 4)))


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("/tmp/should-not-exist-of-interchange"),)  # type: ignore[return-value]


def save_unnamed(path: Path) -> None:
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), AdamW)
    checkpoint.save(path, optimizer=optimizer)


def test_what_cannot_be_carried_is_refused_in_one_line_and_nothing_is_left(
    ranks1: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks1.run(save_unnamed, tmp_path / "unnamed")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "torn", no_dist=True)
    (data,) = (tmp_path / "torn").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-40])
    before = sorted(tmp_path.iterdir())
    for source, form, line in (
        ("torn", "torch-names", "is damaged or foreign"),
        ("unnamed", "torch-names", "parameters have no names, and this format needs them"),
        ("unnamed", "deepspeed-universal", "expected a format of torch, torch-names, zero-optim, got"),
        ("evil", "torch", "which is not read: it might run code"),
    ):
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / "out"), "--to", form]) == 2
        assert line in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
    assert cli.main(["convert", str(tmp_path / "torn"), str(tmp_path / "unnamed"), "--to", "torch"]) == 2
    assert "unnamed exists: name another place, or pass --force" in capsys.readouterr().err
