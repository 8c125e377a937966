"""Checkpoints over a mesh: one replica saves, every one loads, and what fails is named on all ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fully import Tower, whole
from meshes import mesh_of
from pool import Ranks, on_ranks
from test_mesh import built, train
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import loading, saving
from zero_optim.ddp import ShardedDataParallel
from zero_optim.errors import CheckpointError, StateMismatchError


@dataclass(frozen=True)
class Told:
    """What a rank has after a save or a load: the parameters then, a random number, and those in the end."""

    saved: list[Tensor]
    drawn: Tensor
    ended: list[Tensor]


def saves(folder: Path) -> Told:
    """Save over a mesh, at once and in the background, and go on."""
    wrapped, optimizer = built(Tower(), "fully", mesh_of(2), {"master_dtype": torch.float64})
    train(wrapped, optimizer)
    torch.manual_seed(dist.get_rank())
    kept = {"model": wrapped, "optimizer": optimizer}
    checkpoint.save(folder / "now", **kept, extra="now")
    checkpoint.save_async(folder / "later", **kept).wait()
    assert len([*folder.glob("now/*")]) == len([*folder.glob("later/*")])
    saved, drawn = whole(wrapped.module), torch.rand(1)
    train(wrapped, optimizer, 3)
    return Told(saved, drawn, whole(wrapped.module))


def loads(folder: Path, name: str, how: str) -> Told:
    """Load over a mesh, or without one, and go on."""
    model = Tower()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    if how == "no mesh":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, master_dtype=torch.float64
        )
        wrapped: Any = ShardedDataParallel(model, optimizer)
    else:
        wrapped, optimizer = built(model, how, mesh_of(2), {"master_dtype": torch.float64})
    assert checkpoint.load(folder / name, model=wrapped, optimizer=optimizer) == {"now": "now"}.get(name)
    saved, drawn = whole(model), torch.rand(1)
    train(wrapped, optimizer, 3)
    return Told(saved, drawn, whole(model))


def test_one_replica_saves_for_all_and_every_one_loads(ranks4: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    wanted = ranks4.run(saves, tmp_path)
    for name, how, ranks in (
        ("now", "fully", ranks4),
        ("later", "gradients", ranks4),
        ("now", "no mesh", ranks4),
        ("now", "no mesh", ranks2),
    ):
        for got, want in zip(ranks.run(loads, tmp_path, name, how), wanted, strict=False):
            assert all(map(torch.equal, got.saved, want.saved))
            assert torch.equal(got.drawn, want.drawn)
            if how != "no mesh":  # there sums have another order
                assert all(map(torch.equal, got.ended, want.ended))


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@on_ranks(4)
def test_a_save_or_load_that_fails_does_so_on_all_ranks_and_names_one(tmp_path: Path) -> None:
    rank = dist.get_rank()
    wrapped, optimizer = built(Tower(), "fully", mesh_of(2))
    kept = {"model": wrapped, "optimizer": optimizer}
    whose = "" if rank == 1 else "rank 1: "
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(saving, "write_tensors", full)
        with pytest.raises(CheckpointError, match=f"^{whose}cannot write .* No space left"):
            checkpoint.save(tmp_path / "one", **kept)
        with pytest.raises(CheckpointError, match=f"^{whose}cannot write .* No space left"):
            checkpoint.save_async(tmp_path / "one", **kept).wait()
    assert not (tmp_path / "one").exists()
    with pytest.raises(RankMismatchError, match=r"what to save .*: ranks 0, 1 has .*; ranks 2, 3 has"):
        checkpoint.save(tmp_path / str(rank > 1), **kept)
    checkpoint.save(tmp_path / "one", **kept, process_group=dist.group.WORLD)
    train(wrapped, optimizer)
    before = whole(wrapped.module)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 3:
            patched.setattr(loading, "set_random_state", full)
        words = "^the random state of" if rank == 3 else "^rank 3: the random state of"
        with pytest.raises(StateMismatchError, match=words):
            checkpoint.load(tmp_path / "one", **kept)
    assert all(map(torch.equal, whole(wrapped.module), before))
