"""DDP divides sparse gradients in place. Embeddings that are added up share one tensor of gradient values.

torchrun --nproc-per-node 2 ddp_sparse_embeddings.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(10, 4, sparse=True)
        self.positions = torch.nn.Embedding(10, 4, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.tokens(rows) + self.positions(rows)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Sum()
rows = torch.arange(10)  # equal on both ranks, so the mean gradient is that of one rank

model(rows).square().sum().backward()
expected = [param.grad.to_dense() for param in model.parameters()]
for param in model.parameters():
    param.grad = None

wrapped = DistributedDataParallel(model)
wrapped(rows).square().sum().backward()
ratios = [
    (param.grad.to_dense() / grad).mean().item()
    for param, grad in zip(model.parameters(), expected, strict=True)
]
if dist.get_rank() == 0:
    print("equal" if ratios == [1, 1] else f"WRONG: gradients are {ratios} of what they should be")
dist.destroy_process_group()
