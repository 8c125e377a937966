"""A training run in a process of its own, whose parameters are kept in files: how much memory is resident.

Run as ``python tests/offloaded.py FOLDER BUDGET``, with no folder ("") for ordinary memory. Prints, in bytes,
how much higher resident memory gets in training than it was before the model was made.
"""

import ctypes
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, Offload

WIDTH, NUM_LAYERS = 1024, 12
LAYER_NBYTES = WIDTH * WIDTH * 4
KEPT_NBYTES = 4 * NUM_LAYERS * LAYER_NBYTES  # rows, gradients and two entries of state


def status(key: str) -> int:
    """Read how many bytes of memory the system counts for this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(folder: str, budget: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = status("VmRSS")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, cuts=False)
    offload = Offload(folder, budget) if folder else None
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model], offload=offload)
    del model
    status("VmRSS")  # frees what is left of that
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    for _ in range(2):
        wrapped(torch.ones(1, WIDTH)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(status("VmHWM") - before)  # noqa: T201 - what it is for
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
