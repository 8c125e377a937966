"""Models that train on while their process group changes, and ranks that are killed."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_pairs import SMALL_MB, mlp_loss
from forked import fork_context
from training import assert_same_bits, assert_same_state, make_params, params_of, train, whole
from waiting import LIMIT
from worlds import enter
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

SHAPES = ((64, 16), (7,), (32, 8), (), (0, 3), (96,))


def adamw(params: Sequence[Tensor], **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, **options)


def several(params: Sequence[Tensor], **options: Any) -> ZeroRedundancyOptimizer:
    """Several classes, one of them with options of its own; masters and averages."""
    narrow = {"params": params[:2]}
    other = {"params": params[2:], "optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    options = {"master_dtype": torch.float32, "ema_decay": 0.9, **options}
    return ZeroRedundancyOptimizer([narrow, other], torch.optim.AdamW, lr=0.01, **options)


def fresh(make: Callable[..., ZeroRedundancyOptimizer]) -> ZeroRedundancyOptimizer:
    return make(make_params(SHAPES, torch.bfloat16 if make is several else torch.float32))


def assert_trained(
    optimizer: ZeroRedundancyOptimizer, make: Callable[..., ZeroRedundancyOptimizer], steps: int
) -> None:
    """Compare with a run of so many steps in this group; all ranks call."""
    other = fresh(make)
    train(other, 0, steps)
    assert_same_bits(params_of(optimizer), params_of(other))
    assert_same_state(whole(optimizer), whole(other))
    assert list(optimizer.pieces().values()) == list(other.pieces().values())


KINDS = ("plain", "overlap", "sharded", "lazy")


class Trainer:
    """A model, its wrapper and its optimizer, in one of `KINDS`."""

    def __init__(self, kind: str, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.kind = kind
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
        self._register()

    def _register(self) -> None:
        if self.kind == "overlap":
            self.model.register_comm_hook(None, zero_step(self.optimizer))

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            mlp_loss(self.model, number).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def detach(self) -> None:
        self.model.detach()
        self.optimizer.detach()

    def leave(self) -> None:
        """Let go of the group in which a rank has died."""
        self.optimizer.zero_grad()  # of the pass that broke off
        self.detach()
        dist.destroy_process_group()

    def rebind(self, *, keep_state: bool = True) -> None:
        self.optimizer.rebind(keep_state=keep_state)
        self.model.rebind()
        self._register()

    def go_back(self, saved: Path) -> Any:
        """Go on in another group from a checkpoint; gives what was saved beside."""
        self.rebind(keep_state=False)
        return checkpoint.load(saved, model=self.model, optimizer=self.optimizer)


def assert_same_runs(one: Trainer, other: Trainer) -> None:
    """Compare parameters and states; all ranks call."""
    for each in (one, other):
        each.optimizer.wait_for_gathers()
        each.optimizer.consolidate_state_dict(to=None)
    assert_same_bits(list(one.model.parameters()), list(other.model.parameters()))
    assert_same_state(one.optimizer.state_dict(), other.optimizer.state_dict())


def begin_process(folder: Path, rank: int, size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    enter(folder, "all", rank, size)


def run_until_killed(folder: Path, function: Callable[..., None], size: int, left: int) -> list[Any]:
    """Run ``function(folder, rank, size, pipe)`` on ranks of which some kill themselves.

    Returns what those that are left have sent, sorted.
    """
    context = fork_context()
    ours, theirs = context.Pipe(duplex=False)
    folder.mkdir(exist_ok=True)
    processes = [context.Process(target=function, args=(folder, rank, size, theirs)) for rank in range(size)]
    for process in processes:
        process.start()
    theirs.close()
    got = []
    try:
        while len(got) < left and ours.poll(LIMIT):
            got.append(ours.recv())
        for process in processes:
            process.join(LIMIT)
        codes = sorted(process.exitcode or 0 for process in processes)
        assert codes == [-signal.SIGKILL] * (size - left) + [0] * left, (size, codes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        ours.close()
    return sorted(got)
