"""At the end of Join DDP gives all ranks the parameters of the last one, but not its optimizer's state.

torchrun --nproc-per-node 2 ddp_uneven_state.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.randn(2, 6, 8, 4)[dist.get_rank()]


def step(inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    wrapped(inputs).square().mean().backward()
    optimizer.step()


def apart() -> float:
    weights = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(weights, model.weight.detach())
    return (weights[0] - weights[1]).abs().max().item()


with wrapped.join():
    for inputs in data[: 6 - 3 * dist.get_rank()]:  # rank 1 has three batches less
        step(inputs)
assert apart() == 0  # DDP has made them equal
step(data[0])  # the next epoch
off = apart()
if dist.get_rank() == 0:
    print(f"WRONG: replicas differ by {off:.3g} after one more step" if off else "equal")
dist.destroy_process_group()
