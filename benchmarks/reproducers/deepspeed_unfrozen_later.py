"""With DeepSpeed's stages 1 and 2, a parameter that was frozen at initialize() never trains.

torchrun --nproc-per-node 2 deepspeed_unfrozen_later.py
"""

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model[0].requires_grad_(False)
before = model[0].weight.detach().clone()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # it has all parameters
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
inputs = torch.randn(2, 8, 4)[dist.get_rank()]
for step in range(6):
    model[0].requires_grad_(step >= 3)  # gradual unfreezing
    engine.backward(engine(inputs).square().mean())
    engine.step()

moved = (model[0].weight.detach() - before).abs().max().item()
if dist.get_rank() == 0:
    print("equal: it trains" if moved else "WRONG: the weight did not move in three steps")
dist.destroy_process_group()
