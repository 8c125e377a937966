"""FairScale's ShardedDataParallel does not reduce gradients once they were None, as zero_grad() leaves them.

torchrun --nproc-per-node 2 sharded_ddp_none_gradients.py
"""

import copy

import torch
import torch.distributed as dist
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
plain = copy.deepcopy(model)
every = torch.randn(2, 8, 4)
own = every[dist.get_rank()]

optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
wrapped = ShardedDataParallel(model, optimizer)
alone = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()  # with wrapped.zero_grad() it is right; some classes drop gradients in step()
    (wrapped(own) - own).square().mean().backward()
    optimizer.step()
    alone.zero_grad()
    (plain(every) - every).square().mean().backward()
    alone.step()

off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
if dist.get_rank() == 0:
    print(f"WRONG: off by {off:.3g}" if off > 1e-5 else "equal")
dist.destroy_process_group()
