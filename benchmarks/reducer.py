"""Our gradient reducer compared with PyTorch's: time of forward, backward and reduction, and peak memory.

Both take turns on the same model and batches. With a ratio below 1, ours is faster.
"""

import gc
import math
from collections.abc import Callable
from itertools import product
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist
from harness import MIB, arguments, launch, medians, peak_growth, record, show, time_interleaved
from models import workload
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from zero_optim.ddp import DistributedDataParallel

MODELS = ("gpt", "tiny", "resnet")
KINDS = {"torch": TorchDistributedDataParallel, "ours": DistributedDataParallel}


def training(kind: str, name: str, as_view: bool) -> Callable[[], object]:
    """Wrap a model and return a function that runs one iteration, without an optimizer."""
    work = workload(name)
    model = KINDS[kind](work.model, gradient_as_bucket_view=as_view)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [work.batch(generator) for _ in range(4)]

    def iterate() -> None:
        model.zero_grad()
        work.loss(model(batches[0])).backward()  # type: ignore[no-untyped-call]
        batches.append(batches.pop(0))

    return iterate


def time_worker(name: str, as_view: bool, rounds: int) -> dict[str, list[float]]:
    contenders = {kind: training(kind, name, as_view) for kind in KINDS}
    return time_interleaved(contenders, rounds, warmup=6)


def memory_worker(kind: str, name: str, as_view: bool) -> int:
    gc.collect()

    def run() -> None:
        iterate = training(kind, name, as_view)
        for _ in range(5):
            iterate()

    return peak_growth(run)


def measure(world_size: int, name: str, as_view: bool, rounds: int) -> dict[str, Any]:
    times = medians(launch(world_size, time_worker, name, as_view, rounds)[0])
    peaks = {kind: max(launch(world_size, memory_worker, kind, name, as_view)) for kind in KINDS}
    return {
        "ranks": world_size,
        "model": name,
        "gradient_as_bucket_view": as_view,
        "seconds": times,
        "ratio": times["ours"] / times["torch"],
        "peak_nbytes": peaks,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="timed iterations (60)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    runs = [
        measure(ranks, name, as_view, options.rounds)
        for ranks, name, as_view in product(options.ranks, options.models, (False, True))
    ]
    rows = [
        [
            f"{run['model']}, {run['ranks']} ranks{', view' if run['gradient_as_bucket_view'] else ''}",
            *(f"{run['seconds'][kind] * 1e3:.2f}" for kind in KINDS),
            f"{run['ratio']:.3f}",
            *(f"{run['peak_nbytes'][kind] / MIB:.0f}" for kind in KINDS),
        ]
        for run in runs
    ]
    columns = ("iteration", "torch ms", "ours ms", "ratio", "torch peak MiB", "ours peak MiB")
    show(
        "DDP: forward, backward, reduction (median of the slowest rank; peak growth of resident memory)",
        columns,
        rows,
    )
    mean = geometric_mean([run["ratio"] for run in runs])
    print(f"ratios: geometric mean {mean:.3f}, worst {max(run['ratio'] for run in runs):.3f}")
    assert math.isfinite(mean)
    record("reducer", {"runs": runs, "geometric_mean": mean}, dry=options.dry)


if __name__ == "__main__":
    main()
