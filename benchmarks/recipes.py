"""Ways to train with sharded optimizer state, for `overlap.py`: PyTorch's and ours, also with clipping."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Workload, workload
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import AdamW

import zero_optim
import zero_optim.ddp
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import zero_step

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
# Iterations of one contender that are timed, in a row. One comes before them and is not timed. What it leaves
# running belongs to the first of them, as what the last one leaves running belongs to the next: so it is in
# training, which never stops to wait for all.
CONSECUTIVE = 6
MAX_NORM = 1.0
SMALL_BUCKETS_MB = 8.0
QUEUED, COMPUTED = "queued_seconds", "computed_seconds"

Metrics = dict[str, float]
Clip = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """A model in training on this rank.

    Attributes:
        turn: trains for one iteration and `CONSECUTIVE` more, waits for all that still runs, and gives the
            seconds from the end of the first step to the end of the last one.
        metrics: of these seconds: what the library says of the communication, which PyTorch's does not; how
            long this thread computed, and how long it could have and had no core.
        nbytes: of the parameters.
    """

    turn: Callable[[], float]
    metrics: Callable[[], Metrics]
    nbytes: int


def compute_alone(name: str) -> Contender:
    """Forward, backward, and the step of a rank's share; nothing is sent."""
    work = workload(name)
    loads, mine = [0] * dist.get_world_size(), []
    for param in sorted(work.model.parameters(), key=torch.Tensor.numel, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += param.numel()
        if rank == dist.get_rank():
            mine.append(param)
    return training(work, work.model, AdamW(mine, **OPTIONS))


def pytorch(name: str, *, clips: bool = False) -> Contender:
    work = workload(name)
    model = TorchDdp(work.model, gradient_as_bucket_view=True)
    optimizer = TorchZero(model.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)
    clip = (lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) if clips else None
    return training(work, model, optimizer, clip)


def ours(
    name: str,
    *,
    overlap: bool = False,
    lazy: bool = False,
    clips: bool = False,
    wrapper: type = DistributedDataParallel,
) -> Contender:
    work = workload(name)
    model = wrapper(work.model, gradient_as_bucket_view=True)
    # In smaller buckets what the first modules wait for comes earlier.
    cap: dict[str, Any] = {"bucket_cap_mb": SMALL_BUCKETS_MB} if lazy and not overlap else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **cap, **OPTIONS)
    if overlap:
        model.register_comm_hook(None, zero_step(optimizer, ddp=model))
    return finished(work, model, optimizer, lazy=lazy, clips=clips)


def sharded(name: str, *, lazy: bool = False, clips: bool = False) -> Contender:
    """Gradients go to their owners alone, and the step is where it always was."""
    work = workload(name)
    # Buckets of 8 MiB, so that the first one is on its way early; PyTorch's settings are its best, too.
    optimizer = ZeroRedundancyOptimizer(
        work.model.parameters(), AdamW, bucket_cap_mb=SMALL_BUCKETS_MB, **OPTIONS
    )
    model = zero_optim.ddp.ShardedDataParallel(work.model, optimizer)
    return finished(work, model, optimizer, lazy=lazy, clips=clips)


def finished(
    work: Workload, model: nn.Module, optimizer: ZeroRedundancyOptimizer, *, lazy: bool, clips: bool
) -> Contender:
    if lazy:
        optimizer.gather_lazily(model)
    return training(work, model, optimizer, (lambda: optimizer.clip_grad_norm_(MAX_NORM)) if clips else None)


def training(
    work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip | None = None
) -> Contender:
    batch = work.batch(torch.Generator().manual_seed(dist.get_rank()))

    told: Metrics = {}

    def iterate() -> None:
        work.loss(model(batch)).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> float:
        iterate()
        metrics()  # sets the counts back
        start, queued, computed = time.perf_counter(), queued_seconds(), time.thread_time()
        for _ in range(CONSECUTIVE):
            iterate()
        seconds = time.perf_counter() - start
        told.update(metrics())
        told.update({QUEUED: queued_seconds() - queued, COMPUTED: time.thread_time() - computed})
        wait = getattr(optimizer, "wait_for_gathers", None)
        if wait is not None:  # nothing is left running for the contender that comes next
            wait()
        return seconds

    def metrics() -> Metrics:
        total: Counter[str] = Counter()
        for part in (model, optimizer):
            counted: Callable[[], Metrics] | None = getattr(part, "metrics", None)
            total.update(counted() if counted is not None else {})
        return dict(total)

    return Contender(turn, lambda: dict(told), sum(param.nbytes for param in model.parameters()))


def queued_seconds() -> float:
    """Read how long this thread has been ready to run without a core; 0 where the system does not tell."""
    counts = Path("/proc/thread-self/schedstat")
    return int(counts.read_text().split()[1]) * 1e-9 if counts.exists() else 0.0


ALONE, TORCH = "compute alone", "torch DDP + ZeRO"
NOT_OURS = (ALONE, TORCH, f"{TORCH}, clipping")
SHARDED = "ours, gradients sharded"
RECIPES: dict[str, Callable[[str], Contender]] = {
    ALONE: compute_alone,
    TORCH: pytorch,
    f"{TORCH}, clipping": lambda name: pytorch(name, clips=True),
    "ours, no overlap": ours,
    "ours, no overlap, clipping": lambda name: ours(name, clips=True),
    "ours, no overlap, lazy": lambda name: ours(name, lazy=True),
    "ours, zero_step": lambda name: ours(name, overlap=True),
    f"{SHARDED}, lazy": lambda name: sharded(name, lazy=True),
    f"{SHARDED}, lazy, clipping": lambda name: sharded(name, lazy=True, clips=True),
}
MORE: dict[str, Callable[[str], Contender]] = {
    "ours, no overlap, lazy, clipping": lambda name: ours(name, lazy=True, clips=True),
    "ours, zero_step, lazy": lambda name: ours(name, overlap=True, lazy=True),
    SHARDED: sharded,
    f"{SHARDED}, clipping": lambda name: sharded(name, clips=True),
    "torch DDP + zero_step": lambda name: ours(name, overlap=True, wrapper=TorchDdp),
}


def chosen(*, every: bool, sockets: bool, only: Sequence[str] = ()) -> dict[str, Callable[[str], Contender]]:
    """Give the recipes that are to be measured: some, or all; ours also without memory that ranks share.

    ``only``: texts, of which a name has one, but for those of others.
    """
    recipes = RECIPES | MORE if every else RECIPES
    alone = {f"{kind}, sockets": over_sockets(make) for kind, make in recipes.items() if kind not in NOT_OURS}
    recipes = recipes | alone if sockets else recipes
    return {
        kind: make
        for kind, make in recipes.items()
        if not only or kind in NOT_OURS or any(text in kind for text in only)
    }


def over_sockets(make: Callable[[str], Contender]) -> Callable[[str], Contender]:
    """Have a recipe send through sockets alone, and nobody else."""

    def made(name: str) -> Contender:
        zero_optim.share_host_memory(False)
        contender = make(name)
        zero_optim.share_host_memory(True)

        def turn() -> float:
            zero_optim.share_host_memory(False)
            try:
                return contender.turn()
            finally:
                zero_optim.share_host_memory(True)

        return replace(contender, turn=turn)

    return made
