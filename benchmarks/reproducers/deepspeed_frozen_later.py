"""With DeepSpeed's stages 1 and 2, parameters that are frozen after initialize() still move.

torchrun --nproc-per-node 2 deepspeed_frozen_later.py
"""

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
inputs = torch.randn(2, 8, 4)[dist.get_rank()]
for step in range(6):
    if step == 3:
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
    engine.backward(engine(inputs).square().mean())
    engine.step()

moved = (model[0].weight.detach() - before).abs().max().item()
if dist.get_rank() == 0:
    print(f"WRONG: the frozen weight moved by {moved:.3g}" if moved else "equal: it did not move")
dist.destroy_process_group()
