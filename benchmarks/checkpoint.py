"""Saving and loading sharded checkpoints, compared with a consolidated state dict in one file.

Times are seconds of the slowest rank, medians over rounds, fsync included. Memory is the peak growth of
resident memory, and bytes read are those of a rank's read calls; the kernel counts both.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import MIB, arguments, launch, make_params, peak_growth, record, show, state_nbytes
from torch import nn

from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import PendingSave


def training(num_millions: int) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """Make matrices of a million elements, with the state of one step."""
    model = nn.ParameterList(nn.Parameter(p.detach()) for p in make_params([(1000, 1000)] * num_millions))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def owned_nbytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Count the bytes of the rows of parameters that this rank owns."""
    owned = [(p, q) for p, pieces in optimizer.pieces().items() for q in pieces if q.owner == dist.get_rank()]
    return sum(param.nbytes // len(param) * (piece.stop - piece.start) for param, piece in owned)


def read_nbytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def one_file(path: Path, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    """Save without this library's checkpoints: through rank 0."""
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
    dist.barrier()


def load_one_file(path: Path, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank; all ranks call."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def begin(save_async: Callable[[], PendingSave], pending: list[PendingSave]) -> None:
    pending.append(save_async())


def measure(folder: str, num_millions: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank."""
    model, optimizer = training(num_millions)
    sharded, single = Path(folder, "sharded"), Path(folder, "single.pt")
    save_async = partial(checkpoint.save_async, sharded, model=model, optimizer=optimizer)
    contenders = {
        "save": partial(checkpoint.save, sharded, model=model, optimizer=optimizer),
        "load": partial(checkpoint.load, sharded, model=model, optimizer=optimizer),
        "one file, save": partial(one_file, single, model, optimizer),
        "one file, load": partial(load_one_file, single, model, optimizer),
    }
    for work in contenders.values():
        work()
    seconds: dict[str, list[float]] = {
        name: [] for name in (*contenders, "save_async, stall", "save_async, whole")
    }
    for _ in range(rounds):
        for name, work in contenders.items():
            seconds[name].append(timed(work))
        pending: list[PendingSave] = []
        seconds["save_async, stall"].append(timed(partial(begin, save_async, pending)))
        seconds["save_async, whole"].append(seconds["save_async, stall"][-1] + timed(pending[0].wait))
    before = read_nbytes()
    growth = {"load": peak_growth(contenders["load"])}
    read = read_nbytes() - before
    growth["save"] = peak_growth(contenders["save"])
    growth["save_async"] = peak_growth(lambda: save_async().wait())
    own = state_nbytes(optimizer.state) + owned_nbytes(optimizer)
    times = {name: median(values) for name, values in seconds.items()}
    return {"seconds": times, "growth_nbytes": growth, "read_nbytes": read, "own_nbytes": own}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--millions", type=int, default=24, help="elements of all parameters")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results, rows = [], []
    for world_size in options.ranks:
        folder = tempfile.mkdtemp(prefix="zero-optim-checkpoint-")
        try:
            ranks = launch(world_size, measure, folder, options.millions, options.rounds)
        finally:
            shutil.rmtree(folder)
        results.append({"ranks": world_size, "millions": options.millions, "by_rank": ranks})
        first, own = ranks[0]["seconds"], ranks[0]["own_nbytes"]
        grown = {
            key: max(rank["growth_nbytes"][key] for rank in ranks) / MIB for key in ranks[0]["growth_nbytes"]
        }
        rows.append(
            [
                f"W={world_size}, a rank's part {own / MIB:.0f} MiB",
                *(f"{first[name]:.3f}" for name in first),
                f"{max(rank['read_nbytes'] / rank['own_nbytes'] for rank in ranks):.3f}",
                "  ".join(f"{grown[key]:.0f}" for key in ("save", "save_async", "load")),
            ]
        )
    columns = ["", "save", "load", "one file: save", "load", "async: stall", "complete", "read / own"]
    title = f"AdamW over {options.millions} M parameters, seconds of the slowest rank"
    show(title, [*columns, "growth, MiB: save, async, load"], rows)
    record("checkpoint", results, dry=options.dry)


if __name__ == "__main__":
    main()
