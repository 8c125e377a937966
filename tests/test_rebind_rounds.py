"""Many process groups in one process leave nothing behind; survivors of a killed rank go on."""

import ctypes
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from pool import on_ranks
from process_memory import anonymous_nbytes
from survivors import KINDS, Trainer, assert_same_runs, begin_process, run_until_killed
from waiting import wait_until
from worlds import enter, leave, world
from zero_optim import LostStateError, StalledError, checkpoint
from zero_optim.comm import lanes
from zero_optim.shard import gathers

ROUNDS = 20
WARM = 3  # rounds after which nothing more may stay
M_MMAP_THRESHOLD = -3  # malloc.h


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 3))


def left() -> dict[str, int]:
    """What there is without a process group."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(("zero_step", "zero_optim")):  # its users are gone, so it ends
            thread.join()
    objects = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return {
        "threads": len(threading.enumerate()),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(c10d._world.pg_map),
        "pools": len(lanes._POOLS),
        "tensors": len(objects),
        "bytes": sum(each.nbytes for each in objects if each.layout is torch.strided),
    }


@pytest.mark.slow
@on_ranks(2)
def test_twenty_groups_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathers, "LANES_FROM_NBYTES", 1)
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed goes back to the system
        rank = leave()
        trainer: Trainer | None = None
        for number in range(ROUNDS):
            with world(tmp_path, f"round {number}", rank, (0, 1)):
                if trainer is None:
                    trainer = Trainer("overlap", net(2048))
                else:
                    trainer.rebind()
                trainer.train(2 * number, 2 * number + 2)
                checkpoint.save(tmp_path / "saved", model=trainer.model, optimizer=trainer.optimizer)
                trainer.detach()
            if number == WARM:
                before, resident = left(), anonymous_nbytes()
        wait_until(lambda: left()["tasks"] <= before["tasks"])  # threads of the last group end by themselves
        # There may be less, as threads of the backend may have been about to end before.
        assert not {name: count for name, count in left().items() if count > before[name]}, before
        assert anonymous_nbytes() - resident < 4 * 2**20  # 16 times 0.6 MiB if the parameters stayed
        assert trainer is not None
        with world(tmp_path, "in one", rank, (0, 1)):
            other = Trainer("overlap", net(2048))
            other.train(0, 2 * ROUNDS)
            trainer.rebind()
            assert_same_runs(trainer, other)


@pytest.mark.slow
@on_ranks(3)
def test_training_in_worlds_of_several_sizes_equals_runs_resharded_by_checkpoints(tmp_path: Path) -> None:
    """Beside each world there is a run that was saved in the world before, and loaded by this one."""
    rank = leave()
    trainers: dict[str, Trainer] = {}
    for number, size in enumerate((2, 3, 2)):
        if rank >= size:
            trainers = {}
            continue
        with world(tmp_path, f"round {number}", rank, range(size)):
            for kind in KINDS:
                trainers[kind] = go_on_beside_a_resharded_run(tmp_path, kind, number, trainers.get(kind))


def go_on_beside_a_resharded_run(folder: Path, kind: str, number: int, me: Trainer | None) -> Trainer:
    saved = folder / f"{kind}-{number - 1}"
    if me is None and number > 0:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        me = Trainer(kind, net(), alone)
        me.detach()
    if me is None:
        me = Trainer(kind, net())
    elif number < 2:
        me.rebind()
    else:  # in a group without an owner
        me.go_back(saved)
    other = Trainer(kind, net())
    if number > 0:
        checkpoint.load(saved, model=other.model, optimizer=other.optimizer)
    for each in (me, other):
        each.train(2 * number, 2 * number + 2)
    assert_same_runs(me, other)
    checkpoint.save(folder / f"{kind}-{number}", model=other.model, optimizer=other.optimizer)
    me.detach()
    return me


def go_back(folder: Path, rank: int, size: int, result: Any) -> None:
    """The last rank is killed in step 5; the newest checkpoint is of step 4."""
    begin_process(folder, rank, size)
    me = Trainer("plain", net(64))
    me.train(0, 4)
    checkpoint.save(folder / "step-4", model=me.model, optimizer=me.optimizer, extra=4)
    me.train(4, 5)
    if rank == size - 1:
        assert me.optimizer.owned_parameters()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StalledError):
        me.train(5, 100)
    me.leave()
    enter(folder, "left", rank, size - 1)
    with pytest.raises(LostStateError, match="no rank of the new group has the state of parameter"):
        me.optimizer.rebind()
    newest = checkpoint.latest(folder)
    assert newest is not None
    step = me.go_back(newest)
    other = Trainer("plain", net(64))
    checkpoint.load(newest, model=other.model, optimizer=other.optimizer)
    for each in (me, other):
        each.train(step, 8)
    assert_same_runs(me, other)
    result.send((rank, step))


@pytest.mark.slow
def test_survivors_of_a_killed_rank_go_back_to_the_checkpoint_in_the_same_processes(tmp_path: Path) -> None:
    assert run_until_killed(tmp_path, go_back, 4, 3) == [(0, 4), (1, 4), (2, 4)]
