"""Many process groups in one process leave nothing behind; survivors of a killed rank go on."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from ddp_pairs import SMALL_MB, mlp_loss
from forked import fork_context
from pool import on_ranks
from process_memory import anonymous_nbytes
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads
from waiting import wait_until
from worlds import enter, leave, world
from zero_optim import LostStateError, StalledError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint.reader import CheckpointReader
from zero_optim.comm import lanes
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step
from zero_optim.shard import gathers

ROUNDS = 20
WARM = 3  # rounds after which nothing more may stay
M_MMAP_THRESHOLD = -3  # malloc.h


def net(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 3))


class Trainer:
    """A model, its wrapper and its optimizer, as they live on."""

    def __init__(self, kind: str, width: int = 8, group: dist.ProcessGroup | None = None) -> None:
        self.kind = kind
        model = net(width)
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            process_group=group,
            lr=0.01,
            gather_lazily=model if kind == "lazy" else None,
        )
        self.model: DistributedDataParallel
        if kind == "sharded":
            self.model = ShardedDataParallel(model, self.optimizer)
        else:
            self.model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=SMALL_MB)
        self.register()

    def register(self) -> None:
        if self.kind in ("overlap", "owners"):
            to = {"overlap": "everywhere", "owners": "owners"}[self.kind]
            self.model.register_comm_hook(None, zero_step(self.optimizer, gradients=to))  # type: ignore[arg-type]

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            mlp_loss(self.model, number).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def detach(self) -> None:
        self.model.detach()
        self.optimizer.detach()

    def rebind(self) -> None:
        self.optimizer.rebind()
        self.model.rebind()
        self.register()


def left() -> dict[str, int]:
    """What there is without a process group."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in ("zero_step", "zero_optim watchdog"):  # its users are gone, so it ends
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


def run_rounds(folder: Path, kind: str, width: int) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed goes back to the system
    rank = leave()
    trainer: Trainer | None = None
    for number in range(ROUNDS):
        with world(folder, f"round {number}", rank, (0, 1)):
            if trainer is None:
                trainer = Trainer(kind, width)
            else:
                trainer.rebind()
            trainer.train(2 * number, 2 * number + 2)
            checkpoint.save(folder / "saved", model=trainer.model, optimizer=trainer.optimizer)
            trainer.detach()
        if number == WARM:
            before, resident = left(), anonymous_nbytes()
    wait_until(lambda: left()["tasks"] <= before["tasks"])  # threads of the last group end by themselves
    assert left() == before
    assert anonymous_nbytes() - resident < 4 * 2**20  # 16 times 0.6 MiB if the parameters stayed
    assert trainer is not None
    with world(folder, "in one", rank, (0, 1)):
        other = Trainer(kind, width)
        other.train(0, 2 * ROUNDS)
        trainer.rebind()
        assert_same_bits(list(trainer.model.parameters()), list(other.model.parameters()))
        for each in (trainer, other):
            each.optimizer.consolidate_state_dict(to=None)
        assert_same_state(trainer.optimizer.state_dict(), other.optimizer.state_dict())


@on_ranks(2)
@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("sharded", marks=(pytest.mark.slow, pytest.mark.exhaustive)), "overlap"]
)
def test_twenty_groups_in_one_process_leave_nothing_behind(tmp_path: Path, kind: str) -> None:
    width = 2048
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathers, "LANES_FROM_NBYTES", 1)
        run_rounds(tmp_path, kind, width)


@on_ranks(3)
@pytest.mark.parametrize("kind", ["plain", "sharded", "overlap", "owners", "lazy"])
def test_training_in_worlds_of_several_sizes_equals_runs_resharded_by_checkpoints(
    tmp_path: Path, kind: str
) -> None:
    """Beside each world there is a run that was saved in the world before, and loaded by this one."""
    rank = leave()
    trainer: Trainer | None = None
    for number, size in enumerate((2, 3, 2)):
        if rank >= size:
            trainer = None
            continue
        with world(tmp_path, f"round {number}", rank, range(size)):
            if trainer is not None:
                trainer.rebind()
            elif number > 0:
                alone = dist.new_group([rank], use_local_synchronization=True)
                trainer = Trainer(kind, group=alone)
                trainer.detach()
                trainer.rebind()
            other = Trainer(kind)
            if number > 0:
                checkpoint.load(
                    tmp_path / f"saved-{number - 1}", model=other.model, optimizer=other.optimizer
                )
            trainer = Trainer(kind) if trainer is None else trainer
            for each in (trainer, other):
                each.train(2 * number, 2 * number + 2)
            compare(trainer, other)
            checkpoint.save(tmp_path / f"saved-{number}", model=other.model, optimizer=other.optimizer)
            trainer.model.detach()
            trainer.optimizer.detach(staying=range(2))


def compare(me: Trainer, other: Trainer) -> None:
    for each in (me, other):
        each.optimizer.wait_for_gathers()
    assert_same_bits(list(me.model.parameters()), list(other.model.parameters()))
    for each in (me, other):
        each.optimizer.consolidate_state_dict(to=None)
    assert_same_state(me.optimizer.state_dict(), other.optimizer.state_dict())


# ---------------------------------------------------------------------- survivors


class Survivor(Trainer):
    """A rank of some, the last of which is killed."""

    def __init__(self, folder: Path, rank: int, size: int = 3) -> None:
        self.folder = folder
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        enter(folder, "all", rank, size)
        super().__init__("plain", 64)

    def save(self, step: int) -> None:
        path = self.folder / f"step-{step}"
        checkpoint.save(path, model=self.model, optimizer=self.optimizer, extra=step)

    def go_on(self) -> None:
        """Leave the group in which a rank has died, and form one of those that are left."""
        self.optimizer.zero_grad()  # of the pass that broke off
        self.detach()
        dist.destroy_process_group()
        enter(self.folder, "left", self.rank, self.size - 1)


def go_back(folder: Path, rank: int, result: Any) -> None:
    """Rank 3 of four is killed in the middle of step 5; the newest checkpoint is of step 4."""
    me = Survivor(folder, rank, 4)
    me.train(0, 4)
    me.save(4)
    me.train(4, 5)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StalledError):
        me.train(5, 100)
    me.go_on()
    with pytest.raises(LostStateError, match="nobody in the new group holds the state of parameter"):
        me.optimizer.rebind()
    result.send((rank, *return_to_newest(me)))


def return_to_newest(me: Survivor) -> tuple[int, int]:
    """Go back, train, and compare with a run that was resharded there; gives the step, and what was read."""
    newest = checkpoint.latest(me.folder)
    assert newest is not None
    keys: list[str] = []
    read_tensor = CheckpointReader.read_tensor

    def noting(reader: CheckpointReader, key: str, *args: Any) -> Tensor:
        keys.append(key)
        return read_tensor(reader, key, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read_tensor", noting)
        step: int = checkpoint.rebind(newest, model=me.model, optimizer=me.optimizer)
    me.model.rebind()
    me.train(step, 8)
    other = Trainer("plain", 64)
    checkpoint.load(newest, model=other.model, optimizer=other.optimizer)
    other.train(step, 8)
    compare(me, other)
    return step, len([key for key in keys if "exp_avg" in key])


def read_what_is_lost(folder: Path, rank: int, result: Any) -> None:
    """Rank 2 is killed after a save, before another step; the others keep what they hold."""
    me = Survivor(folder, rank)
    me.train(0, 4)
    me.save(4)
    if rank == 2:
        assert me.optimizer.owned_parameters()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StalledError):
        me.train(4, 100)
    me.go_on()
    result.send((rank, *return_to_newest(me)))


def go_on_without_a_file(folder: Path, rank: int, result: Any) -> None:
    """Rank 2, which owns nothing, is killed while the others gather."""
    me = Survivor(folder, rank)
    optimizer = ZeroRedundancyOptimizer(make_params([(40, 7), (30,)]), torch.optim.AdamW, lr=0.01)
    for step in range(4):
        set_grads(params_of(optimizer), step)
        if step == 3 and rank == 2:
            assert not optimizer.owned_parameters()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
        except StalledError:  # or not: some of what it sends is taken by gloo and lost
            assert step == 3
    optimizer.detach()
    me.go_on()
    optimizer.rebind()
    plain = torch.optim.AdamW(make_params([(40, 7), (30,)]), lr=0.01)
    for step in range(4):
        set_grads(params_of(plain), step)
        plain.step()
    assert_same_bits(params_of(optimizer), params_of(plain))
    result.send((rank, 4, len(optimizer.owned_parameters())))


def run_until_killed(
    folder: Path, function: Callable[..., None], size: int = 3
) -> list[tuple[int, int, int]]:
    """Run a function on some ranks, of which the last kills itself; gives what the others sent."""
    context = fork_context()
    ours, theirs = context.Pipe(duplex=False)
    processes = [context.Process(target=function, args=(folder, rank, theirs)) for rank in range(size)]
    for process in processes:
        process.start()
    theirs.close()
    got = []
    try:
        while len(got) < size - 1 and ours.poll(240):
            got.append(ours.recv())
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0] * (size - 1) + [-signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return sorted(got)


def test_survivors_of_a_killed_rank_go_back_to_the_checkpoint_in_the_same_processes(tmp_path: Path) -> None:
    got = run_until_killed(tmp_path, go_back, 4)
    assert [each[:2] for each in got] == [(0, 4), (1, 4), (2, 4)]
    assert sum(number for *_, number in got) == 2 * 6  # both averages of all parameters


def test_survivors_read_only_what_is_lost_if_they_hold_the_rest_of_the_checkpoint(tmp_path: Path) -> None:
    got = run_until_killed(tmp_path, read_what_is_lost)
    assert [each[:2] for each in got] == [(0, 4), (1, 4)]
    assert 0 < sum(number for *_, number in got) < 2 * 6


def test_survivors_that_hold_all_state_go_on_without_a_file(tmp_path: Path) -> None:
    got = run_until_killed(tmp_path, go_on_without_a_file)
    assert [rank for rank, *_ in got] == [0, 1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_script_of_the_document_goes_on_with_two_of_three_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "docs" / "survive.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("goes on with [0, 2] from step 10") == 2, done.stdout
    assert "after 20 steps on 2 ranks" in done.stdout
