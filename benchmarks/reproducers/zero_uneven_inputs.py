"""Under Join, a rank without inputs steps its shard of ZeroRedundancyOptimizer without gradients.

torchrun --nproc-per-node 2 zero_uneven_inputs.py
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
data = torch.randn(2, 6, 8, 4)


def train(model: torch.nn.Module, *, sharded: bool) -> torch.nn.Module:
    wrapped = DistributedDataParallel(model)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([wrapped, optimizer] if sharded else [wrapped]):
        for inputs in data[dist.get_rank()][: 6 - 3 * dist.get_rank()]:  # rank 1 has three batches less
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
    return model


one, other = train(copy.deepcopy(plain), sharded=True), train(plain, sharded=False)
off = max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))
if dist.get_rank() == 0:
    print(f"WRONG: off by {off:.3g}" if off > 1e-6 else "equal")
dist.destroy_process_group()
