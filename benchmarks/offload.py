"""Steps of what is kept in mapped files, compared with memory and with the disk's own speed; and memory.

Two ranks, 24 matrices of a million elements, AdamW(fused). *The disk alone* reads and writes as many bytes by
plain calls, in portions as large as the budget: it reads rows, gradients and state, writes rows and state,
and calls fsync. The page cache is as it is: on a machine with much memory reads come from there, in both.

Peak memory is that of new processes, one rank: how much higher resident memory gets in two iterations than it
was after the model was wrapped. In memory the rows of the parameters are there by then.
"""

import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import MIB, arguments, launch, medians, peak_growth, record, show, time_interleaved
from torch import nn

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, Offload

NUM_LAYERS, WIDTH = 24, 1000
LAYER_NBYTES = 4 * WIDTH * WIDTH
BUDGET = 32 * MIB


def training(folder: Path | None) -> tuple[FullyShardedDataParallel, ZeroRedundancyOptimizer]:
    """Make a model that is kept in files of a folder, or in memory."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    offload = None if folder is None else Offload(folder, BUDGET)
    return FullyShardedDataParallel(model, optimizer, units=[*model], offload=offload), optimizer


def backward(wrapped: FullyShardedDataParallel) -> None:
    wrapped(torch.ones(1, WIDTH)).sum().backward()


class Disk:
    """Reads and writes what a step does, by plain calls.

    Args:
        folder: where its file is.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this
        self._buffer = bytearray(os.urandom(BUDGET))
        self.nbytes = 4 * NUM_LAYERS * LAYER_NBYTES // dist.get_world_size()
        os.posix_fallocate(self._file.fileno(), 0, self.nbytes)

    def step(self) -> None:
        """Go through the file once."""
        file = self._file.fileno()
        for start in range(0, self.nbytes, BUDGET):
            portion = memoryview(self._buffer)[: self.nbytes - start]
            os.preadv(file, [portion], start)
            os.pwrite(file, portion[: len(portion) * 3 // 4], start)
            os.fsync(file)


def time_steps(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Time steps in turns; gives the bytes that a rank keeps too."""
    disk, (whole, one), (kept, other) = Disk(folder), training(None), training(folder)
    backward(whole)
    backward(kept)
    return time_interleaved(
        {"in memory": one.step, "in files": other.step, "the disk alone": disk.step}, rounds=5, warmup=2
    ), disk.nbytes


def peak(folder: Path | None) -> int:
    """Measure training in a process that has trained nothing before."""
    wrapped, optimizer = training(folder)
    return peak_growth(partial(train, wrapped, optimizer))


def train(wrapped: FullyShardedDataParallel, optimizer: ZeroRedundancyOptimizer) -> None:
    for _ in range(2):
        backward(wrapped)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    args = arguments(__doc__)
    args.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if left out")
    options = args.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        times, nbytes = launch(2, time_steps, folder)[0]
        grown = {kind: launch(1, peak, own)[0] for kind, own in (("in memory", None), ("in files", folder))}
    seconds = medians(times)
    moved = nbytes * 7 / 4 / MIB  # all is read, three of four bytes are written
    rows = [[kind, f"{1e3 * took:.0f}", f"{moved / took:.0f}"] for kind, took in seconds.items()]
    show(f"A step, {nbytes / MIB:.0f} MiB kept a rank", ["", "ms", "MiB/s read and written"], rows)
    kept = 4 * NUM_LAYERS * LAYER_NBYTES
    memory = [[kind, f"{value / MIB:.0f}"] for kind, value in grown.items()]
    title = f"Peak in training, {kept / MIB:.0f} MiB kept, budget {BUDGET // MIB} MiB"
    show(title, ["", "MiB above what it was after wrapping"], memory)
    results = {"seconds": times, "kept_nbytes": nbytes, "peak_nbytes": grown, "budget": BUDGET}
    record("offload", results, dry=options.dry)


if __name__ == "__main__":
    main()
