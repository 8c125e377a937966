"""A training run in a process of its own, whose parameters are kept in files: how much memory is resident.

Run as ``python tests/offloaded.py FOLDER BUDGET``, with no folder ("") for ordinary memory. Prints, in bytes,
how much higher resident memory gets in training than it was before the model was made.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn

from process_memory import forget_peak, peak_nbytes, resident_nbytes, trim
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, Offload

WIDTH, NUM_LAYERS = 1024, 12
LAYER_NBYTES = WIDTH * WIDTH * 4
KEPT_NBYTES = 4 * NUM_LAYERS * LAYER_NBYTES  # rows, gradients and two entries of state


def clean_up() -> None:
    """Give back what nobody uses."""
    gc.collect()
    trim()


def main(folder: str, budget: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    clean_up()
    before = resident_nbytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, cuts=False)
    offload = Offload(folder, budget) if folder else None
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model], offload=offload)
    del model
    clean_up()
    forget_peak()
    for _ in range(2):
        wrapped(torch.ones(1, WIDTH)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(peak_nbytes() - before)  # noqa: T201 - what it is for
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
