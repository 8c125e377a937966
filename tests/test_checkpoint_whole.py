"""Checkpoints are whole or not there: kills at every moment, full disks, damage, and hostile files."""

import json
import os
import pickle
import resource
import signal
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forked import fork_context
from pool import Ranks, on_ranks
from survivors import begin_process
from test_checkpoint import flip, once
from test_checkpoint_hostile import content_of, write
from training import set_grads
from zero_optim import CheckpointError, NotConsolidatedError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import data, saving

MOMENTS = range(1, 25)  # file operations of a rank at which it is killed, in each of two ways


def training(seed: int = 0) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    set_grads(list(model.parameters()), step)
    optimizer.step()


def total(model: nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


# ---------------------------------------------------------------------- killed


def die_at(moment: int) -> None:
    """Kill this process at its n-th checksum, write, flush, renaming or removal in a checkpoint."""
    count = 0

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    for owner, name in (
        (os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "rmdir"), (Path, "open"),
        (os, "open"),
        (data, "write_all"), (data.zlib, "crc32"), (saving, "write_tensors"),
    ):  # fmt: skip
        counted(owner, name)


def save_until_killed(folder: Path, rank: int, victim: int, moment: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    begin_process(folder, rank, 2)
    model, optimizer = training()
    for step in range(8):
        train(model, optimizer, step)
        extra = {"step": step, "sum": total(model)}
        if step == 1 and rank == victim:  # the first save is whole
            die_at(moment)
        saved = {"model": model, "optimizer": optimizer, "extra": extra, "keep": 2}
        if step % 2:
            checkpoint.save_async(folder / "saved" / str(step % 4), **saved).wait()
        else:
            checkpoint.save(folder / "saved" / str(step), **saved)


def load_all(folders: list[Path]) -> list[tuple[int, bool]]:
    """Load the newest checkpoint of each folder: its step, and whether everything in it belongs together."""
    found = []
    for folder in folders:
        model, optimizer = training(seed=1)
        newest = checkpoint.latest(folder / "saved")
        assert newest is not None, list((folder / "saved").rglob("*"))
        extra = checkpoint.load(newest, model=model, optimizer=optimizer)
        steps = {float(entries["step"]) for entries in optimizer.state.values()}
        right = total(model) == extra["sum"]
        found.append((extra["step"], right and steps == {extra["step"] + 1.0}))
    return found


ALL = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("everyone", "moments"),
    [
        pytest.param(False, (1, 20), id="one rank, some moments"),
        pytest.param(True, (7, 16), id="all ranks, some moments"),
        pytest.param(False, MOMENTS, id="one rank, all moments", marks=ALL),
        pytest.param(True, MOMENTS, id="all ranks, all moments", marks=ALL),
    ],
)
def test_killed_at_any_moment_of_a_save_the_newest_whole_checkpoint_loads(
    ranks1: Ranks, tmp_path: Path, everyone: bool, moments: Sequence[int]
) -> None:
    context = fork_context()
    folders = []
    for moment in moments:
        for victim in (0, 1):
            folder = tmp_path / f"{moment}-{victim}"
            folder.mkdir()
            folders.append(folder)
            arguments = [(folder, rank, victim, 4 * moment - 2 * victim) for rank in (0, 1)]
            processes = [context.Process(target=save_until_killed, args=each) for each in arguments]
            for process in processes:
                process.start()
            processes[victim].join(300)
            if everyone:
                processes[1 - victim].kill()
            processes[1 - victim].join(300)
            codes = [process.exitcode for process in processes]
            assert codes[victim] == -signal.SIGKILL, codes
            # The other one raised, and did not hang; it may have got so far before it was killed.
            assert codes[1 - victim] in ((1, -signal.SIGKILL) if everyone else (1,)), codes
    found = ranks1.run(load_all, folders, timeout=300)[0]
    assert all(right for _, right in found)
    assert len({step for step, _ in found}) > 1  # the moments cover more than one save


# ---------------------------------------------------------------------- disks


@on_ranks(2)
def test_a_full_disk_raises_on_every_rank_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model, optimizer = training()
    train(model, optimizer, 0)
    checkpoint.save(path, model=model, optimizer=optimizer, extra=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    train(model, optimizer, 1)
    for save in (checkpoint.save, lambda *a, **k: checkpoint.save_async(*a, **k).wait()):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        try:
            with pytest.raises(
                CheckpointError, match=r"cannot write the checkpoint .*File too large.*still are"
            ):
                save(path, model=model, optimizer=optimizer, extra=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert len(list(path.iterdir())) == 1 + dist.get_world_size()  # nothing is left of what failed
    assert checkpoint.load(path, model=model, optimizer=optimizer) == 0
    checkpoint.save(path, model=model, optimizer=optimizer, extra=2)
    assert checkpoint.load(path) == 2


# ---------------------------------------------------------------------- damage


@on_ranks(2)
def test_damaged_and_incomplete_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    model, optimizer = training()
    for step in range(3):
        train(model, optimizer, step)
        checkpoint.save(tmp_path / str(step), model=model, optimizer=optimizer, extra=step)
    before = [p.clone() for p in model.parameters()]
    once(lambda: flip(next((tmp_path / "2").glob("data-*-1.safetensors"))))
    with pytest.raises(
        CheckpointError, match=r"is damaged: .* in data-.*-1.safetensors: its checksum is wrong"
    ):
        checkpoint.load(tmp_path / "2", model=model, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert checkpoint.latest(tmp_path) == tmp_path / "1"
    assert checkpoint.latest(tmp_path, quick=True) == tmp_path / "2"
    for name in ("2", "1"):
        once(lambda name=name: os.truncate(next((tmp_path / name).glob("data-*")), 100))
    with pytest.raises(CheckpointError, match="should have"):
        checkpoint.load(tmp_path / "1", model=model, optimizer=optimizer)
    assert checkpoint.latest(tmp_path, quick=True) == tmp_path / "0"
    once((tmp_path / "1" / "manifest.json").unlink)
    with pytest.raises(CheckpointError, match="it has no manifest, so it was never completed"):
        checkpoint.load(tmp_path / "1", model=model, optimizer=optimizer)
    assert checkpoint.load(tmp_path / "0", model=model, optimizer=optimizer) == 0
    train(model, optimizer, 1)


# ---------------------------------------------------------------------- hostile


class Hostile:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def forge(path: Path) -> None:
    """Have the manifest name a file outside the folder, checksum and all."""
    content = content_of(path)
    content["files"][0][0] = "../../etc/passwd"
    write(path, json.dumps(content))


@on_ranks(2)
def test_nothing_that_is_planted_in_the_folder_is_executed(tmp_path: Path) -> None:
    path, mark = tmp_path / "one", tmp_path / "executed"
    model, optimizer = training()
    train(model, optimizer, 0)
    checkpoint.save(path, model=model, optimizer=optimizer)
    hostile = pickle.dumps(Hostile(mark))
    for name in (".metadata", "__0_0.distcp"):  # where DCP's own storage keeps its pickle
        once(lambda name=name: (path / name).write_bytes(hostile))
    checkpoint.load(path, model=model, optimizer=optimizer)
    for name in ("manifest.json", *(path.name for path in path.glob("data-*"))):
        whole, file = (path / name).read_bytes(), path / name
        once(partial(file.write_bytes, hostile.ljust(len(whole), b"\0")))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(path, model=model, optimizer=optimizer)
        assert checkpoint.latest(path) is None
        once(partial(file.write_bytes, whole))
    once(partial(forge, path))
    with pytest.raises(CheckpointError, match="no name of a data file"):
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert not mark.exists()


# ---------------------------------------------------------------------- through DCP


@on_ranks(2)
def test_state_dicts_of_dcp_step_no_rank_alone() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    for stepped, optimizer_class in (
        (True, torch.optim.AdamW),
        (True, torch.optim.SGD),
        (False, torch.optim.Adagrad),
    ):
        model = nn.Linear(3, 3, bias=False)  # one parameter: the other rank owns nothing
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1)
        if stepped:
            train(model, optimizer, 0)
            optimizer.zero_grad()
            with pytest.raises(NotConsolidatedError, match="consolidate_state_dict"):
                get_optimizer_state_dict(model, optimizer)
            optimizer.consolidate_state_dict(to=None)
        expected = optimizer.state_dict()["state"]
        optimizer.zero_grad()
        before = model.weight.clone()
        whole = get_optimizer_state_dict(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert whole["state"].keys() == ({"weight"} if expected else set())
        for key, value in expected.get(0, {}).items():
            assert torch.equal(whole["state"]["weight"][key], value)  # type: ignore[index]
        if whole["state"]:
            set_optimizer_state_dict(model, optimizer, whole)
        assert torch.equal(model.weight, before)
        train(model, optimizer, 1)


@on_ranks(2)
def test_steps_of_a_warm_up_or_without_autograd_are_steps_also_where_a_rank_owns_nothing() -> None:
    for lr, grad, records in product((0.0, 0.1), (0.0, 1.0), (False, True)):
        model = nn.Linear(3, 3, bias=False)  # one parameter: the other rank owns nothing
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)
        for number in range(1, 3):
            model.weight.grad = torch.full_like(model.weight, grad)
            with torch.set_grad_enabled(records):
                optimizer.step()
            assert optimizer.num_steps == number
        optimizer.consolidate_state_dict(to=None)
        assert optimizer.state_dict()["state"][0]["step"] == 2
