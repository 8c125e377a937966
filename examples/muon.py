"""Muon for the matrices and AdamW for the rest, in one sharded optimizer. Needs PyTorch 2.9 or newer.

    torchrun --standalone --nproc-per-node 2 examples/muon.py

Muon orthogonalizes whole matrices: each rank does that for the matrices that it owns, and sends the results.
Without sharding, every rank does it for all. The model learns to sort the digits of random numbers.
"""

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zero_optim import ZeroRedundancyOptimizer

DIGITS, WIDTH, BATCH = 8, 128, 256


class Sorter(nn.Module):
    """Maps digits (samples, DIGITS) to logits (samples, DIGITS, 10) of the same digits in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.places = nn.Embedding(DIGITS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, digits: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(digits) + self.places.weight))
        return logits


def build(model: Sorter) -> ZeroRedundancyOptimizer:
    """Return one optimizer with two classes; each group names its own, or has the one of the optimizer."""
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen]
    # The time to orthogonalize a matrix depends on its shape. By "matmul" all ranks take about the same time.
    muon: dict[str, Any] = {
        "params": matrices,
        "optimizer_class": torch.optim.Muon,
        "lr": 0.02,
        "cost": "matmul",
    }
    return ZeroRedundancyOptimizer([muon, {"params": rest}], torch.optim.AdamW, lr=1e-3, weight_decay=0.01)


def train(steps: int, device: torch.device) -> list[float]:
    """Train on this rank of the default process group; return the losses, each over all ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Sorter().to(device)
    optimizer = build(model)
    wrapped = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # other samples on every rank
    losses = []
    for step in range(1, steps + 1):
        digits = torch.randint(10, (BATCH // dist.get_world_size(), DIGITS), generator=generator).to(device)
        loss = F.cross_entropy(wrapped(digits).flatten(0, 1), digits.sort().values.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 25 == 0 or step == steps):
            print(f"update {step:>4}  loss {losses[-1]:.3f}")
    explanation = optimizer.explain()  # what each rank holds; all ranks call
    if dist.get_rank() == 0:
        print(explanation)
    return losses


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    train(100, device)
    gc.collect()  # DistributedDataParallel goes before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
