"""Iterations with and without overlap, compared with PyTorch's DDP and ZeRO at their best settings.

AdamW(fused), one thread a rank; contenders take turns in one run. "compute alone" is forward, backward and
the step of what a rank owns, without communication. The time of an iteration beyond it is exposed
communication.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, launch, medians, record, show, time_interleaved
from link import Link, emulated, require_root
from models import Workload, workload
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import AdamW

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import zero_step

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
CONSECUTIVE = 3  # iterations of one contender in a row: the next one waits for what the last left running
Iteration = Callable[[], object]


def compute_alone(name: str) -> Iteration:
    """Train on this rank only, and step what a rank owns."""
    work = workload(name)
    params = list(work.model.parameters())
    owned = ZeroRedundancyOptimizer(params, AdamW, **OPTIONS).owned_parameters()
    return iteration(work, work.model, AdamW(owned, **OPTIONS))


def pytorch(name: str) -> Iteration:
    work = workload(name)
    model = TorchDdp(work.model, gradient_as_bucket_view=True)
    return iteration(
        work, model, TorchZero(model.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)
    )


def ours(
    name: str, *, overlap: str = "", lazy: bool = False, wrapper: type = DistributedDataParallel
) -> Iteration:
    work = workload(name)
    model = wrapper(work.model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **OPTIONS)
    if overlap:
        model.register_comm_hook(None, zero_step(optimizer, gradients=overlap))
    if lazy:
        optimizer.gather_lazily(model)
    return iteration(work, model, optimizer)


def iteration(work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iteration:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = work.batch(generator)

    def iterate() -> None:
        for _ in range(CONSECUTIVE):
            optimizer.zero_grad()
            work.loss(model(batch)).backward()
            optimizer.step()
        wait = getattr(optimizer, "wait_for_gathers", None)
        if wait is not None:  # what still runs belongs to these iterations
            wait()

    return iterate


CONTENDERS: dict[str, Callable[[str], Iteration]] = {
    "compute alone": compute_alone,
    "torch DDP + ZeRO": pytorch,
    "ours, no overlap": ours,
    "ours, zero_step": lambda name: ours(name, overlap="everywhere"),
    "ours, zero_step, lazy gather": lambda name: ours(name, overlap="everywhere", lazy=True),
    "ours, zero_step to owners": lambda name: ours(name, overlap="owners"),
    "ours, zero_step to owners, lazy": lambda name: ours(name, overlap="owners", lazy=True),
    "torch DDP + zero_step": lambda name: ours(name, overlap="everywhere", wrapper=TorchDdp),
    "torch DDP + zero_step to owners": lambda name: ours(name, overlap="owners", wrapper=TorchDdp),
}


def worker(name: str, rounds: int) -> dict[str, list[float]]:
    times = time_interleaved({kind: make(name) for kind, make in CONTENDERS.items()}, rounds, warmup=2)
    return {kind: [seconds / CONSECUTIVE for seconds in row] for kind, row in times.items()}


def measure(name: str, ranks: int, rounds: int, link: Link | None) -> dict[str, Any]:
    times = medians(launch(ranks, worker, name, rounds, link=link)[0])
    return {"model": name, "ranks": ranks, "link": link is not None, "seconds": times}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="timed iterations (20)")
    parser.add_argument("--models", nargs="+", default=["gpt"], help="gpt, tiny, resnet (gpt)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="ranks over loopback (2)")
    parser.add_argument("--link", action="store_true", help="2 ranks over an emulated link; needs root")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, in the notation of tc (1gbit)")
    options = parser.parse_args()
    if options.link:
        require_root()
    with emulated(options.rate) if options.link else nullcontext() as link:
        ranks = [2] if options.link else options.ranks
        runs = [measure(name, size, options.rounds, link) for name in options.models for size in ranks]
    for run in runs:
        tell(run, options.rate)
    record("overlap", {"rate": options.rate if options.link else None, "runs": runs}, dry=options.dry)


def tell(run: dict[str, Any], rate: str) -> None:
    """Print one run: times, ratios, exposed communication."""
    times = run["seconds"]
    alone, theirs = times["compute alone"], times["torch DDP + ZeRO"]
    rows = [
        [kind, f"{t * 1e3:.1f}", f"{t / theirs:.3f}", f"{(t - alone) * 1e3:.1f}"] for kind, t in times.items()
    ]
    where = f"a link of {rate}" if run["link"] else "loopback"
    columns = ("iteration", "ms", "ratio to torch", "exposed communication, ms")
    show(f"{run['model']}, {run['ranks']} ranks over {where}", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
