"""What all benchmarks use: ranks on this machine, timing in turns, peak memory, tables, records.

Absolute times on a shared machine vary by tens of per cent between runs. So contenders take turns in one run,
and their ratios are compared.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from link import Link
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zero_optim

RESULTS = Path(__file__).parent / "results"
MIB = 2**20

Shape = tuple[int, ...]
Worker = Callable[..., object]


def gpt_shapes(num_layers: int = 6, width: int = 384, vocab: int = 4096, context: int = 64) -> list[Shape]:
    """List the parameter shapes of a GPT with an untied head; 13.8 M elements by default."""
    block: list[Shape] = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocab, width), (context, width), *block * num_layers, (width,), (width,), (vocab, width)]


def make_params(shapes: Sequence[Shape], seed: int = 0) -> list[Tensor]:
    """Make parameters with gradients, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).mul_(1e-3)
    return params


# ---------------------------------------------------------------------- ranks


def launch(world_size: int, worker: Worker, *args: object, link: Link | None = None) -> list[Any]:
    """Run ``worker(*args)`` on ranks of a gloo group on this machine, one thread each.

    Args:
        world_size: number of ranks.
        worker: runs on each rank. It must return plain values.
        *args: its arguments.
        link: connects the ranks, each in its namespace.

    Returns:
        What each rank returned, by rank.
    """
    enter = None if link is None else link.enter
    return zero_optim.launch(worker, world_size, *args, threads=1, prepare=enter)


# ---------------------------------------------------------------------- measuring


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Time contenders in turns; all ranks call.

    Each round runs every contender once, each after a barrier. Each round starts with another contender.
    A contender that returns a float has timed itself, and that counts.

    Returns:
        For each contender the seconds of its slowest rank in each round, without the warm-up rounds.
    """
    names = list(contenders)
    seconds = torch.zeros(warmup + rounds, len(names), dtype=torch.float64)
    gc.collect()
    gc.disable()  # a collection belongs to no contender
    for turn in range(warmup + rounds):
        for place in range(len(names)):
            index = (place + turn) % len(names)
            dist.barrier()
            start = time.perf_counter()
            own = contenders[names[index]]()
            seconds[turn, index] = own if isinstance(own, float) else time.perf_counter() - start
    gc.enable()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {name: seconds[warmup:, index].tolist() for index, name in enumerate(names)}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contender's times."""
    return {name: median(values) for name, values in times.items()}


def resident_nbytes() -> int:
    """Return the resident bytes of this process, without free memory of its heap (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise free memory in the heap would hide a growth
    return _status("VmRSS")


def peak_growth(work: Callable[[], object]) -> int:
    """Return the largest growth of resident memory in bytes during ``work`` (Linux)."""
    before = resident_nbytes()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def state_nbytes(state: Mapping[Any, Mapping[str, Any]]) -> int:
    """Count the bytes of an optimizer's state tensors by their storage."""
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# ---------------------------------------------------------------------- reporting


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="print the table and keep no record")
    return parser


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. The first column is aligned to the left, the others to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    Console(width=None if console.is_terminal else 130).print(table)


BACKEND = "gloo over loopback, one thread a rank"


def record(name: str, results: object, *, dry: bool, backend: str = BACKEND) -> None:
    """Append a run to ``results/NAME.json``, a list of runs from old to new."""
    if dry:
        return
    path = RESULTS / f"{name}.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend,
    }
    runs.append(
        {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine,
            "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
            "results": results,
        }
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")
