"""Programs that watch what a `GradScaler` does see the same with this optimizer as with one of PyTorch."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from frameworks import as_torchrun_says
from pool import on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def make_optimizer(model: nn.Module, is_sharded: bool) -> torch.optim.Optimizer:
    if is_sharded:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The first two steps have an infinity on the last rank."""
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    is_infinite = step < 2 and dist.get_rank() == dist.get_world_size() - 1
    loss: Tensor = model(inputs).float().square().mean()
    return loss * math.inf if is_infinite else loss


# ---------------------------------------------------------------------- accelerate


def run_with_accelerate(is_sharded: bool) -> tuple[list[Any], list[Tensor]]:
    """Train as its guide says; gives by step whether it was skipped, the learning rate, and the scale."""
    from accelerate import Accelerator  # slow, hence here

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    accelerator.scaler = make_scaler()  # it makes one itself, but not on the CPU
    model = make_model()
    optimizer = make_optimizer(model, is_sharded)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # stepped once by each rank
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    told = []
    for step in range(5):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        told.append((optimizer.step_was_skipped, scheduler.get_last_lr(), accelerator.scaler.get_scale()))
    return told, [param.detach().clone() for param in model.parameters()]


@on_ranks(2)
def test_accelerate_knows_which_steps_were_skipped_and_leaves_them_out_of_the_schedule() -> None:
    from accelerate.state import AcceleratorState  # slow, hence here

    runs = []
    for is_sharded in (False, True):
        try:
            with as_torchrun_says():
                runs.append(run_with_accelerate(is_sharded))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    (expected, params), (told, mine) = runs
    assert expected == told
    assert [skipped for skipped, _, _ in told] == [True, True, False, False, False]
    assert told[-1][1:] == ([0.05 * 0.5**3], 2.0**6)
    assert_same_bits(mine, params)


# ---------------------------------------------------------------------- Lightning


def run_with_lightning(precision: str, is_sharded: bool) -> tuple[Any, list[Tensor]]:
    import lightning.pytorch as pl  # slow, hence here
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, 2 if precision == "bf16-mixed" else index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self, is_sharded)

    # Lightning itself trains in bfloat16 if asked for 16-mixed on the CPU.
    scaler = make_scaler() if precision == "16-mixed" else None
    plugin: Any = MixedPrecision(precision, "cpu", scaler)  # type: ignore[arg-type]
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo"),
        plugins=plugin,
        gradient_clip_val=0.5,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(5, 1)))
    return plugin.state_dict(), [param.detach().clone() for param in module.parameters()]


@on_ranks(2)
@pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"
)  # PyTorch 2.13
@pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers"
)  # where there are cores
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips_gradients_in_mixed_precision(precision: str) -> None:
    with as_torchrun_says():
        (expected, params), (told, mine) = (
            run_with_lightning(precision, is_sharded) for is_sharded in (False, True)
        )
    assert told == expected
    assert told.get("scale") == (2.0**6 if precision == "16-mixed" else None)
    assert_same_bits(mine, params)
