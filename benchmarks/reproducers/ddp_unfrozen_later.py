"""DDP does not reduce the gradient of a parameter that was frozen when it was wrapped: replicas drift apart.

torchrun --nproc-per-node 2 ddp_unfrozen_later.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
inputs = torch.randn(2, 8, 4)[dist.get_rank()]  # each rank has its own

model[0].requires_grad_(False)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        model[0].requires_grad_(True)  # gradual unfreezing
    wrapped(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

weights = [torch.empty(4, 4) for _ in range(2)]
dist.all_gather(weights, model[0].weight.detach())
apart = (weights[0] - weights[1]).abs().max().item()
if dist.get_rank() == 0:
    print(f"WRONG: replicas differ by {apart:.3g}" if apart else "equal")
dist.destroy_process_group()
