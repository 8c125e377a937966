"""A LightningModule whose optimizer state and gradients are sharded: strategy "zero2". Needs `lightning`.

    python examples/lightning_zero2.py --devices 2

Two lines differ from a script with ``strategy="ddp"``: the optimizer, and the strategy. "zero1" shards the
state alone, "zero3" the parameters too.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zero_optim.integrations.lightning  # noqa: F401 - registers "zero1", "zero2" and "zero3"
from zero_optim import ZeroRedundancyOptimizer


class Regression(pl.LightningModule):
    """Learns a fixed function of eight numbers."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), *hidden, nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - as Lightning has it
        optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def samples(count: int) -> TensorDataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--resume", help="checkpoint to go on from, of any number of devices")
    args = parser.parse_args(arguments)
    pl.seed_everything(0)  # the same weights on every rank
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), DataLoader(samples(4096), batch_size=64), ckpt_path=args.resume)
    trainer.save_checkpoint("lightning_zero2.ckpt")  # all ranks call
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main()
