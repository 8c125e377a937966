"""With FairScale's ShardedDataParallel, parameters that are frozen later still move.

torchrun --nproc-per-node 2 sharded_ddp_frozen_later.py
"""

import torch
import torch.distributed as dist
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
wrapped = ShardedDataParallel(model, optimizer)  # auto_refresh_trainable is True
inputs = torch.randn(2, 8, 4)[dist.get_rank()]
for step in range(6):
    if step == 3:
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
    wrapped(inputs).square().mean().backward()
    optimizer.step()
    wrapped.zero_grad(set_to_none=True)

moved = (model[0].weight.detach() - before).abs().max().item()
if dist.get_rank() == 0:
    print(f"WRONG: the frozen weight moved by {moved:.3g}" if moved else "equal: it did not move")
dist.destroy_process_group()
