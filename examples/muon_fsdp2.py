"""Muon for the matrices and AdamW for the rest, on a model that FSDP2 shards. Needs PyTorch 2.9 or newer.

    torchrun --standalone --nproc-per-node 2 examples/muon_fsdp2.py

FSDP2 keeps rows of each matrix on each rank, and Muon needs whole ones: `step()` brings rows of gradients to
an owner, which orthogonalizes, and rows of the new matrix back. AdamW steps the rows where they lie. The
model learns to sort the digits of random numbers. A second run goes on from the checkpoint of the first one,
on any number of ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from zero_optim import ZeroRedundancyOptimizer

DIGITS, WIDTH, BATCH = 8, 64, 256


class Sorter(nn.Module):
    """Maps digits (samples, DIGITS) to logits (samples, DIGITS, 10) of the same digits in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(10, WIDTH), nn.Embedding(DIGITS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, digits: Tensor) -> Tensor:
        places = self.places(torch.arange(DIGITS, device=digits.device))
        logits: Tensor = self.head(self.blocks(self.embedding(digits) + places))
        return logits


def build(device: torch.device) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Return a sharded model, and one optimizer with two classes."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Sorter().to(device)
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    chosen = set(matrices)
    muon: dict[str, Any] = {
        "params": matrices,
        "optimizer_class": torch.optim.Muon,
        "lr": 0.02,
        "cost": "matmul",
    }
    rest = {"params": [param for param in model.parameters() if param not in chosen]}
    return model, ZeroRedundancyOptimizer([muon, rest], torch.optim.AdamW, lr=1e-3, weight_decay=0.01)


def load(folder: Path, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    """Load a checkpoint, which any number of ranks saved."""
    weights, state = get_state_dict(model, optimizer)
    both: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])


def train(steps: int, device: torch.device, folder: Path) -> list[float]:
    """Train on this rank of the default process group, and save; return the losses, each over all ranks."""
    model, optimizer = build(device)
    if folder.exists():
        load(folder, model, optimizer)
    explanation = optimizer.explain()  # what each rank holds; all ranks call
    if dist.get_rank() == 0:
        print(explanation)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # other samples on every rank
    losses = []
    for step in range(1, steps + 1):
        digits = torch.randint(10, (BATCH // dist.get_world_size(), DIGITS), generator=generator).to(device)
        loss = F.cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 25 == 0 or step == steps):
            print(f"update {step:>4}  loss {losses[-1]:.3f}")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    return losses


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    train(100, device, Path(sys.argv[1] if len(sys.argv) > 1 else "muon_fsdp2"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
