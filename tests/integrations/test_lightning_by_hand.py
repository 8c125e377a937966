"""Modules that step by hand train at stages 1 to 3 as with `DDPStrategy`: one optimizer, several, GANs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_lightning import Fit, Module, batches
from torch import Tensor, nn

from frameworks import as_torchrun_says, assert_as_ddp, assert_resumes, assert_same, whole
from pool import Pool, on_ranks
from zero_optim import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW


class ByHand(Module):
    """Steps one optimizer by hand, and clips."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.automatic_optimization = False

    def optimizers_of(self, *parts: nn.Module) -> list[Any]:
        built = partial(ZeroRedundancyOptimizer, optimizer_class=AdamW) if self.stage else AdamW
        return [built(part.parameters(), lr=0.05) for part in parts]

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.clip_gradients(optimizer, 0.3, "norm")
        optimizer.step()


class TwoOptimizers(ByHand):
    """Steps the body and the head in turn."""

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(nn.ModuleList([self.net.first, self.net.blocks]), self.net.last)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        both: Any = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(Module.training_step(self, batch, index))
        for optimizer in both:
            optimizer.step()


class Gan(ByHand):
    """Trains a generator and a critic in turn; the critic's loss leaves the generator out."""

    units = "auto"
    leaves_out = True

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self.net, self.critic)

    def take(self, optimizer: Any, is_fake: bool, batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        fake, real = self.net(batch[0]), batch[1]
        self.manual_backward(
            self.critic(fake).square().mean()
            if is_fake
            else (self.critic(fake.detach()) - self.critic(real)).mean()
        )
        self.clip_gradients(optimizer, 0.3, "norm")
        optimizer.step()

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        generator, critic = self.optimizers()
        self.take(critic, False, batch)
        self.take(generator, True, batch)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.critic(self.net(batch[0])).mean(), sync_dist=True)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_modules_may_step_by_hand(stage: int) -> None:
    assert_as_ddp(Fit(stage, module=ByHand))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gans_train_and_can_be_tested(stage: int) -> None:
    results = []
    for each in (0, stage):
        trainer, trained = Fit(each, module=Gan).run()
        weights = whole(trained)
        if stage == 3 and dist.get_rank() > 0:  # rank 0 sends buffers there, and DDPStrategy does not
            weights = {name: value for name, value in weights.items() if "running" not in name}
        with as_torchrun_says():
            losses = trainer.test(trained, batches(), verbose=False)
        results.append((weights, losses))
    (expected, losses), (got, same) = results
    assert_same(got, expected)
    assert same == losses


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpoints_of_several_optimizers_resume(pool: Pool, tmp_path: Path, stage: int, size: int) -> None:
    assert_resumes(pool, tmp_path, Fit(stage, module=Gan), size)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_optimizers_may_have_parts_of_one_module_but_not_at_stage_3(stage: int) -> None:
    assert_as_ddp(Fit(stage, module=TwoOptimizers))
    with pytest.raises(ValueError, match="at stage 3 expected one module for each optimizer"):
        Fit(3, module=TwoOptimizers).run()
