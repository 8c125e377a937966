"""Ranks fail, or hear of trouble, at chosen moments of a save: a whole checkpoint is there after each."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from training import set_grads
from zero_optim import CheckpointError, RemoteRankError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import manifest, saving


def in_background(*args: Any, **options: Any) -> None:
    checkpoint.save_async(*args, **options).wait()


BOTH = pytest.mark.parametrize("call", [checkpoint.save, in_background])


class Run:
    """A run that has saved twice into one folder: step 1, and at each call of `save` the next one."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        self.path, self.step = path, 0
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.1)
        self.save(checkpoint.save)
        dist.barrier()  # rank 0 has removed the lock

    def save(self, call: Callable[..., None]) -> None:
        self.step += 1
        set_grads(list(self.model.parameters()), self.step)
        self.optimizer.step()
        call(self.path, model=self.model, optimizer=self.optimizer, extra=self.step)

    def check(self, step: int) -> None:
        """Check that the folder has the checkpoint of a step, whole, and nothing else."""
        dist.barrier()
        assert checkpoint.latest(self.path) == self.path
        assert checkpoint.load(self.path, model=self.model, optimizer=self.optimizer) == step
        dist.barrier()
        self.save(checkpoint.save)
        dist.barrier()
        assert len(list(self.path.iterdir())) == 1 + dist.get_world_size()


@on_ranks(2)
@BOTH
def test_a_rank_that_gives_up_while_rank_0_completes_the_save_takes_no_file_away(
    tmp_path: Path, call: Callable[..., None]
) -> None:
    run, store = Run(tmp_path / "last"), dist.distributed_c10d._get_default_store()
    real, commit, saves = saving._Save._together, manifest.commit, list[Any]()

    def give_up(save: Any) -> Any:
        saves.append(save)
        if len(saves) == 3:  # after the lock and the data files
            raise RemoteRankError("planted: rank 2 has ended")
        return real(save)

    def wait_for_it(*args: Any) -> None:
        store.wait(["gave up"])
        commit(*args)

    if dist.get_rank() == 0:
        with mock.patch.object(manifest, "commit", wait_for_it):
            run.save(call)
    else:
        gives_up = mock.patch.object(saving._Save, "_together", give_up)
        with gives_up, pytest.raises(RemoteRankError, match="planted"):
            run.save(call)
        store.set("gave up", "")
        for _ in range(2):  # what it left out
            with real(saves[-1]):
                pass
    run.check(2)


@on_ranks(2)
@pytest.mark.parametrize(
    ("point", "step"), [("pathlib.Path.replace", 1), ("zero_optim.checkpoint.manifest.read", 2)]
)
def test_where_rank_0_cannot_complete_or_read_back_the_save_one_of_both_is_whole(
    tmp_path: Path, point: str, step: int
) -> None:
    run = Run(tmp_path / "last")
    failing = CheckpointError("planted") if "read" in point else OSError("planted")
    planted = mock.patch(point, side_effect=failing) if dist.get_rank() == 0 else nullcontext()
    with planted, pytest.raises(CheckpointError, match="planted"):
        run.save(checkpoint.save)
    dist.barrier()
    left = 1 + dist.get_world_size() * step  # those of the old one are left if the new one cannot be read
    assert len(list(run.path.iterdir())) == left
    run.check(step)


@on_ranks(2)
def test_a_data_file_that_goes_while_the_manifest_is_written_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    run, real = Run(tmp_path / "last"), manifest.sync_folder
    before = set(run.path.iterdir())

    def lose(folder: Path) -> None:
        real(folder)
        next(path for path in folder.glob("data-*-1.*") if path not in before).unlink()

    with mock.patch.object(manifest, "sync_folder", lose), pytest.raises(CheckpointError, match="is missing"):
        run.save(checkpoint.save)
    dist.barrier()
    assert set(run.path.iterdir()) == before
    run.check(1)


@on_ranks(2)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_save_whose_thread_is_told_to_end_raises_on_every_rank(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    run = Run(tmp_path / "last")
    here = dist.get_rank() == 1
    raises = pytest.raises(CheckpointError, match=f"in the background was ended by {kind.__name__}")
    for place, name, is_hit in ((saving, "write_tensors", here), (saving._Save, "write", True)):
        planted = mock.patch.object(place, name, side_effect=kind) if is_hit else nullcontext()
        with planted, raises:
            run.save(in_background)
    run.check(1)
