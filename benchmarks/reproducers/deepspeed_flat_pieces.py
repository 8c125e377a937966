"""DeepSpeed's stages 1 and 2 step flat pieces: Adafactor, which needs matrices, becomes another optimizer.

torchrun --nproc-per-node 2 deepspeed_flat_pieces.py
"""

import copy

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
plain = copy.deepcopy(model)
inputs = torch.randn(8, 4)  # equal on both ranks

optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,  # it refuses the class without
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
alone = torch.optim.Adafactor(plain.parameters(), lr=0.1)
for _ in range(4):
    engine.backward(engine(inputs).square().mean())
    engine.step()
    alone.zero_grad()
    plain(inputs).square().mean().backward()
    alone.step()

off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
if dist.get_rank() == 0:
    print(f"WRONG: off by {off:.3g}" if off > 1e-4 else "equal")
dist.destroy_process_group()
