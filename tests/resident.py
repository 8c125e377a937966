"""One rank of a training run in a process of its own: how much memory a fully sharded model takes.

Run as ``python tests/resident.py RANK WORLD_SIZE FOLDER``, once for each rank. Prints, in bytes, how much
higher resident memory gets in training than it was before the model was made, and how much is planned.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from process_memory import forget_peak, peak_nbytes, resident_nbytes, trim
from zero_optim import ZeroRedundancyOptimizer, return_freed_memory
from zero_optim.ddp import FullyShardedDataParallel

WIDTH, NUM_LAYERS = 896, 64  # 205 MB of parameters, in units of 3.2 MB


def clean_up() -> None:
    """Return what nobody uses to the system."""
    gc.collect()
    trim()


def made(width: int, num_layers: int) -> tuple[FullyShardedDataParallel, ZeroRedundancyOptimizer]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return FullyShardedDataParallel(model, optimizer, units=[*model]), optimizer


def train(wrapped: FullyShardedDataParallel, optimizer: ZeroRedundancyOptimizer, width: int) -> int:
    """Train for two steps. Gives the most bytes that were whole at a time, and those of gradient rows."""
    live: list[int] = []

    def look(*_: object) -> None:
        live.append(wrapped.units.nbytes_live())

    def look_both_ways(_: nn.Module, __: object, output: Tensor) -> None:
        look()
        output.register_hook(look)  # type: ignore[no-untyped-call]

    handles = [module.register_forward_hook(look_both_ways) for module in wrapped.module.children()]
    grads = 0
    for _ in range(2):
        wrapped(torch.ones(1, width)).sum().backward()
        found = [getattr(param.grad, "piece", param.grad) for param in optimizer.owned_parameters()]
        grads = sum(grad.nbytes for grad in found if isinstance(grad, Tensor))
        del found
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return max(live) + grads


def main(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    return_freed_memory()
    store = dist.FileStore(str(Path(folder) / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    train(*made(WIDTH, 8), WIDTH)  # so that all code is there, and all pages of the rings that ranks share
    clean_up()
    before = resident_nbytes()
    wrapped, optimizer = made(WIDTH, NUM_LAYERS)
    clean_up()  # of what is left of the whole model
    forget_peak()
    moving = train(wrapped, optimizer, WIDTH)
    rows = sum(bucket.row.nbytes for unit in wrapped.units.units for bucket in unit.buckets)
    planned = moving + rows + optimizer.state_nbytes()
    print(peak_nbytes() - before, planned)  # noqa: T201 - what it is for
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
