"""ZeroRedundancyOptimizer runs LBFGS on each rank's own parameters alone, without an error.

torchrun --nproc-per-node 2 zero_lbfgs.py
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()
inputs = torch.randn(8, 4, dtype=torch.float64)  # equal on both ranks, so that their losses are


def train(model: torch.nn.Module, sharded: bool) -> list[torch.Tensor]:
    wrapped, params = DistributedDataParallel(model), model.parameters()
    optimizer = ZeroRedundancyOptimizer(params, LBFGS, max_iter=3) if sharded else LBFGS(params, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (wrapped(inputs) - inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return list(model.parameters())


one, other = train(copy.deepcopy(plain), True), train(plain, False)
off = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
if dist.get_rank() == 0:
    print(f"WRONG: off by {off:.3g}" if off > 1e-9 else "equal")
dist.destroy_process_group()
