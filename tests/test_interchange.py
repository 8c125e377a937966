"""Checkpoints of other libraries come in and go out, offline; training goes on bit for bit on both sides."""

import os
import pickle
import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from cuts import ONE_A_BUCKET, cutting
from fully import Tower
from pool import Ranks, on_ranks
from test_checkpoint import Run, once
from test_checkpoint_offline import save_large
from training import assert_same_bits, assert_same_state
from zero_optim import ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint import offline
from zero_optim.comm.encoding import map_tensors
from zero_optim.errors import CheckpointError

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
@pytest.mark.not_late("PyTorch's DCP asks a group which devices it serves, and one in Python cannot say")
@pytest.mark.parametrize("flat", [False, True])
def test_what_fsdp2_saved_comes_in_and_training_goes_on(tmp_path: Path, flat: bool) -> None:
    model, optimizer = fsdp()
    train(model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    saved = {"model": weights, "optim": state, "step": 2, "lr_scheduler": {"last_epoch": 2}}
    dcp.save({"app": saved} if flat else saved, checkpoint_id=tmp_path / "theirs")
    once(lambda: offline.reshard(tmp_path / "theirs", tmp_path / "ours", 2))
    other, own = ours()
    scheduler = torch.optim.lr_scheduler.ConstantLR(own)
    extra = checkpoint.load(tmp_path / "ours", model=other, optimizer=own, scheduler=scheduler)
    assert extra == {"step": 2}
    assert scheduler.last_epoch == 2
    assert own.param_groups[1]["weight_decay"] == 0.0
    assert_same_bits(train(other, own, range(2, 4)), train(model, optimizer, range(2, 4)))


@on_ranks(2)
@pytest.mark.not_late("PyTorch's DCP asks a group which devices it serves, and one in Python cannot say")
@pytest.mark.parametrize("cut", [False, True])
def test_fsdp2_loads_what_is_converted_and_goes_on_and_what_it_saves_is_the_same(
    tmp_path: Path, cut: bool
) -> None:
    model, optimizer = ours(cut)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "ours", model=model, optimizer=optimizer, extra={"step": 2})
    once(lambda: offline.convert(tmp_path / "ours", tmp_path / "theirs", "dcp"))
    other, plain = fsdp()
    weights, state = get_state_dict(other, plain)
    saved = {"model": weights, "optimizer": state, "extra": {"step": 0}}
    dcp.load(saved, checkpoint_id=tmp_path / "theirs")
    assert saved["extra"]["step"] == 2
    set_state_dict(other, plain, model_state_dict=weights, optim_state_dict=state)
    dcp.save(saved, checkpoint_id=tmp_path / "back")
    once(lambda: offline.reshard(tmp_path / "back", tmp_path / "again", 2))
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
    drawn = torch.rand(3)

    def there_and_back() -> None:
        for form in ("torch", "torch-names"):
            offline.convert(tmp_path / "ours", tmp_path / f"{form}.pt", form)
            offline.reshard(tmp_path / f"{form}.pt", tmp_path / form, 2)
        offline.convert(tmp_path / "torch.pt", tmp_path / "dcp", "dcp")
        offline.convert(tmp_path / "dcp", tmp_path / "last.pt", "torch-names")
        offline.reshard(tmp_path / "last.pt", tmp_path / "last", 1)
        first, last = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("torch-names", "last"))
        first["optimizer"]["state"] = map_tensors(
            first["optimizer"]["state"], Tensor.contiguous
        )  # as DCP has it
        assert_same_state(last["optimizer"], first["optimizer"])
        assert first.keys() == last.keys() == {"model", "optimizer", "scheduler", "extra", "random"}

    once(there_and_back)
    run.train(5)
    for folder in ("torch", "torch-names", "last"):
        again = Run()
        again.load(tmp_path / folder)
        assert torch.equal(torch.rand(3), drawn)  # random states too
        again.train(5)
        assert_same_bits(again.bits(), run.bits())


@on_ranks(2)
def test_plain_optimizers_load_what_is_converted(tmp_path: Path) -> None:
    model, optimizer = ours(cut=True)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "ours", model=model, optimizer=optimizer)
    results = []

    def convert() -> None:
        offline.convert(tmp_path / "ours", tmp_path / "torch", "torch")
        offline.convert(tmp_path / "ours", tmp_path / "torch-names", "torch-names")

    once(convert)
    for form in ("torch", "torch-names"):
        plain = Model()
        theirs = AdamW(groups_of(plain), lr=0.5)
        content = torch.load(tmp_path / form, weights_only=True)
        plain.load_state_dict(content["model"])
        if form == "torch":
            theirs.load_state_dict(content["optimizer"])
        else:
            set_optimizer_state_dict(plain, theirs, content["optimizer"])
        results.append(train(plain, theirs, range(2, 4)))
    expected = train(model, optimizer, range(2, 4))
    for result in results:
        assert_same_bits(result, expected)


def of_names(model: nn.Module) -> list[str]:
    return [name for group in groups_of(model, named=True) for name, _ in group["params"]]


@on_ranks(2)
@pytest.mark.parametrize("form", ["index", "names apart", "param_names", "names", "flat"])
def test_all_forms_of_an_optimizers_state_dict_come_in(tmp_path: Path, form: str) -> None:
    model = Model()
    theirs = AdamW(groups_of(model, named=form == "param_names"), lr=0.01)
    train(model, theirs, range(2))
    state: Any = theirs.state_dict()
    if form in ("names", "flat"):
        state = get_optimizer_state_dict(model, theirs, options=FLAT if form == "flat" else None)

    def come_in() -> None:
        (tmp_path / "names.txt").write_text("\n".join(of_names(model)) + "\n")
        parts = {"model_state_dict": model.state_dict(), "optimizer_state_dict": state}
        torch.save({**parts, "epoch": 3, "random": {"seed": 4}}, tmp_path / "theirs.pt")
        more = ["--names", str(tmp_path / "names.txt")] if form == "names apart" else []
        command = ["reshard", str(tmp_path / "theirs.pt"), str(tmp_path / "ours"), "--world-size", "2", *more]
        assert cli.main(command) == 0

    once(come_in)
    other, own = ours()
    extra = checkpoint.load(tmp_path / "ours", model=other, optimizer=own)
    assert extra == {"epoch": 3, "random": {"seed": 4}}
    assert_same_bits(train(other, own, range(2, 4)), train(model, theirs, range(2, 4)))


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("/tmp/should-not-exist-of-interchange"),)  # type: ignore[return-value]


def save_sparse(path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    checkpoint.save(path, model=model, extra={"array": np.zeros(2)})


def save_as_deepspeed(path: Path, ranks: int, params: int, numel: int, **more: Any) -> None:
    """Write what DeepSpeed saves of parameters at stage 2: one group, cut into equal flat partitions."""
    path.mkdir()
    names, rows = [f"weight{index}" for index in range(params)], params * numel // ranks
    shapes = {"param_shapes": [{name: torch.Size([numel]) for name in names}], "frozen_param_shapes": None}
    weights = {name: torch.full([numel], float(index)) for index, name in enumerate(names)}
    torch.save(
        {**shapes, "module": weights, "dp_world_size": ranks, **more}, path / "mp_rank_00_model_states.pt"
    )
    for rank in range(ranks):
        places = {}
        for index, name in enumerate(names):
            start, stop = max(rank * rows, index * numel), min((rank + 1) * rows, (index + 1) * numel)
            if start < stop:
                places[name] = Namespace(start=start - rank * rows, numel=stop - start)
        flats = [torch.cat(list(weights.values()))[rank * rows :][:rows].clone() for _ in range(3)]
        state = {"step": torch.tensor(3.0), "exp_avg": flats[0], "exp_avg_sq": flats[1]}
        flat: dict[str, Any] = {
            "single_partition_of_fp32_groups": [flats[2]],
            "param_slice_mappings": [places],
        }
        flat["base_optimizer_state"] = {"state": {0: state}, "param_groups": [{"params": [0]}]}
        torch.save({"optimizer_state_dict": flat}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def test_a_universal_checkpoint_of_deepspeed_comes_in(tmp_path: Path) -> None:
    """As ds_to_universal writes it: a folder of flat tensors for each parameter."""
    folder, weight = tmp_path / "theirs" / "global_step3", torch.rand(2, 3)
    (folder / "zero" / "weight").mkdir(parents=True)
    (tmp_path / "theirs" / "latest").write_text("global_step3")
    entries = {"fp32": weight, "exp_avg": torch.rand(2, 3), "exp_avg_sq": torch.rand(2, 3)}
    for name, value in entries.items():
        torch.save({"param": value.flatten()}, folder / "zero" / "weight" / f"{name}.pt")
    torch.save(torch.tensor(3.0), folder / "zero" / "weight" / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": []}]}, folder / "zero" / "optimizer_state.pt")
    shapes = {"param_shapes": [{"weight": torch.Size([2, 3])}], "frozen_param_shapes": None}
    whole = {**shapes, "module": {"weight": weight}, "dp_world_size": 1, "global_steps": 3}
    torch.save(whole, folder / "mp_rank_00_model_states.pt")
    offline.convert(tmp_path / "theirs", tmp_path / "out.pt", "torch-names")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert content["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["weight"]}]
    assert content["extra"] == {"global_steps": 3}
    state = content["optimizer"]["state"]["weight"]
    assert state.pop("step") == 3
    assert {"fp32", *state} == entries.keys()
    assert_same_bits([content["model"]["weight"], *state.values()], [*entries.values()])


def save_unnamed(path: Path) -> None:
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), AdamW)
    checkpoint.save(path, optimizer=optimizer)


def test_what_cannot_be_carried_is_refused_in_one_line_and_nothing_is_left(
    ranks1: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks1.run(save_sparse, tmp_path / "sparse")
    ranks1.run(save_unnamed, tmp_path / "unnamed")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "empty").mkdir()
    linear = nn.Linear(2, 2)
    optimizer = AdamW(linear.parameters())
    linear(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": linear.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    dcp.save({"model": linear.state_dict()}, checkpoint_id=tmp_path / "torn", no_dist=True)
    (data,) = (tmp_path / "torn").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-40])
    state = {
        "state": {0: {"parts": {1: torch.ones(2)}}},
        "param_groups": [{"params": [0], "param_names": "w"}],
    }
    torch.save(state, tmp_path / "keys")
    for name, more in (("lost", {}), ("tensor parallel", {}), ("object", {"args": Namespace(lr=1)})):
        save_as_deepspeed(tmp_path / name, 1, 1, 4, **more)
    (tmp_path / "lost" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    torch.save({}, tmp_path / "tensor parallel" / "mp_rank_01_model_states.pt")
    (tmp_path / "names").write_text("weight\n")
    (tmp_path / "twice").write_text("weight\nweight\n")
    before = sorted(tmp_path.iterdir())
    stale = tmp_path / f"out.{'0' * 16}.part"  # of a process that was killed
    stale.mkdir()
    (stale / "__0_0.distcp").touch()
    for source, more, line in (
        (
            "torn",
            ("--to", "dcp"),
            "is damaged or foreign",
        ),  # while it is written; the stale folder goes first
        ("sparse", ("--to", "dcp"), "kind sparse, which this format cannot carry"),
        ("sparse", ("--to", "torch"), "kind array, which this format cannot carry"),
        ("unnamed", ("--to", "dcp"), "parameters have no names, and this format needs them"),
        ("unnamed", ("--to", "torch-names"), "parameters have no names"),
        ("unnamed", ("--to", "deepspeed-universal"), "expected a format of torch, torch-names, dcp, got"),
        ("file.pt", ("--to", "dcp"), "convert a file of its state with --names"),
        (
            "file.pt",
            ("--to", "dcp", "--names", str(tmp_path / "names")),
            "each of the optimizer's 2 parameters",
        ),
        ("file.pt", ("--to", "dcp", "--names", str(tmp_path / "twice")), "have the name weight"),
        ("file.pt", ("--to", "dcp", "--names", str(tmp_path / "none")), "cannot read"),
        ("unnamed", ("--to", "torch", "--names", str(tmp_path / "names")), "names go with a file"),
        ("evil", ("--to", "torch"), "which is not read: it might run code"),
        ("empty", ("--to", "torch"), "it has no manifest, so it was never completed"),
        ("torn", ("--to", "torch"), "is damaged or foreign"),
        ("keys", ("--to", "dcp"), "has the key 1, and DCP keeps those that are text"),
        ("lost", ("--to", "dcp"), "it has 0 files of optimizer state, not 1"),
        ("tensor parallel", ("--to", "dcp"), "is of tensor, pipeline or expert parallelism"),
        ("object", ("--to", "dcp"), "holds a Namespace"),
        ("nowhere", ("--to", "dcp"), "there is no such folder"),
    ):
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / "out"), *more]) == 2
        shown = capsys.readouterr().err
        assert line in shown
        assert sorted(tmp_path.iterdir()) == before
    for there in ("file.pt", "empty", "unnamed"):
        assert cli.main(["convert", str(tmp_path / "torn"), str(tmp_path / there), "--to", "torch"]) == 2
        assert "is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("form", offline.FORMATS)
def test_a_disk_that_is_full_is_not_blamed_on_the_source(form: str, tmp_path: Path) -> None:
    layer = nn.Linear(128, 128)
    optimizer = AdamW(layer.named_parameters())
    layer(torch.ones(128)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1000, 2**16):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match=r"^cannot write .*: File too large"):
                offline.convert(tmp_path / "file.pt", tmp_path / "out", form)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]


GROWTH = """
import sys
sys.path.insert(0, {tests!r})
from test_interchange import *
from process_memory import growth, least_growth

def tour(source, out):
    return [
        growth(offline.convert, Path(source), Path(out + ".pt"), "torch-names"),
        growth(offline.convert, Path(source), Path(out + "-dcp"), "dcp"),
        growth(offline.convert, Path(out + ".pt"), Path(out + "-dcp2"), "dcp"),
        growth(offline.convert, Path(out + "-dcp"), Path(out + "2.pt"), "torch"),
        growth(offline.reshard, Path(out + "-dcp2"), Path(out + "-ours"), 2),
        growth(offline.reshard, Path(source + "-of-deepspeed"), Path(out + "-ours2"), 2),
    ]

print(least_growth(tour, sys.argv[1], sys.argv[2]))
"""


@pytest.mark.slow
def test_a_conversion_holds_a_shard_and_a_tensor(ranks2: Ranks, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("memory is measured as Linux tells it")
    ranks2.run(save_large, tmp_path / "small", 16)
    ranks2.run(save_large, tmp_path / "large", 2048)  # 30 tensors of 8 MiB
    save_as_deepspeed(tmp_path / "small-of-deepspeed", 2, 5, 2**14)
    save_as_deepspeed(tmp_path / "large-of-deepspeed", 2, 5, 2**21)  # 20 tensors of 8 MiB
    script = GROWTH.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")]
    # A large tensor that is freed goes back to the system, and not into holes of the heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    options: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr
    # MiB: the bytes of a tensor, what is read from them, and the whole; far from the 240 of the checkpoint.
    assert float(done.stdout) <= 24 + 16
