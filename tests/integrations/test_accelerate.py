"""Accelerate trains at stages 1 to 3 as with its own DDP: bits, clipping, accumulation, resume."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import frameworks
from frameworks import (
    Block,
    Net,
    Weights,
    assert_as_ddp,
    assert_resumes,
    averages_in,
    fresh,
    samples,
    sums_in_order,
    whole,
)
from pool import Pool, on_ranks
from zero_optim import NotConsolidatedError, ZeroRedundancyOptimizer
from zero_optim.integrations.accelerate import Accelerator
from zero_optim.integrations.stages import WRAPPERS

AdamW = torch.optim.AdamW


@dataclass
class Run(frameworks.Run):
    """A script as Accelerate's guide has it."""

    accumulates: int = 1
    scales: bool = False
    model: Callable[[], nn.Module] = Net
    is_own: bool = False  # Accelerate's class at stage 1

    def accelerator(self) -> accelerate.Accelerator:
        options = {"cpu": True, "gradient_accumulation_steps": self.accumulates, **self.options()}
        if not self.stage or self.is_own:
            return accelerate.Accelerator(**options)
        wrap = {"units": [Block], **self.wrap} if self.stage == 3 else self.wrap
        return Accelerator(zero_stage=self.stage, wrap=wrap, **options)

    def weights(self) -> Weights:
        with fresh(), sums_in_order(self.in_order):
            accelerator, model = self.accelerator(), self.model()
            if self.scales:  # it makes one itself, but not on the CPU
                accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            optimizer: Any = AdamW(model.parameters(), lr=0.05)
            if self.stage:
                optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            loader = DataLoader(TensorDataset(*samples()), batch_size=2)
            wrapped, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
            assert self.stage < 2 or isinstance(wrapped, WRAPPERS[self.stage])
            if self.resumes:
                accelerator.load_state(str(self.resumes))
            told = []
            for _ in range(self.epochs):
                for number, (inputs, targets) in enumerate(loader):
                    with accelerator.accumulate(wrapped):
                        loss = nn.functional.mse_loss(wrapped(inputs), targets)
                        is_infinite = self.scales and number < 2 and accelerator.is_last_process
                        accelerator.backward(loss * math.inf if is_infinite else loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(wrapped.parameters(), 0.3)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    scale = accelerator.scaler.get_scale() if self.scales else 1.0
                    told.append([optimizer.step_was_skipped, *scheduler.get_last_lr(), scale])
            assert [skipped for skipped, *_ in told[:3]] == [self.scales, self.scales, False]
            if self.saves:
                if self.stage and self.is_own:
                    with pytest.raises(NotConsolidatedError, match=r"zero_optim\.integrations has classes"):
                        accelerator.save_state(str(self.saves))
                    optimizer.optimizer.consolidate_state_dict(to=None)
                accelerator.save_state(str(self.saves))
            return {**whole(model), "told": torch.tensor(told)}

    def saved(self, path: Path) -> Weights:
        return averages_in(torch.load(path / "optimizer.bin"))


UNUSED = DistributedDataParallelKwargs(find_unused_parameters=True)
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scales": True},
    "bf16": {"options": lambda: {"mixed_precision": "bf16"}},
    "accumulated": {"accumulates": 2, "wrap": {"accumulate": "local"}},
    "unused": {"options": lambda: {"kwargs_handlers": [UNUSED]}},
    "Accelerate's own class, scaled": {"scales": True, "is_own": True},
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for name in RUNS for stage in (1, 2, 3)[: 1 if "own" in name else 3]]
)
def test_each_stage_trains_with_the_bits_of_ddp(stage: int, name: str) -> None:
    assert_as_ddp(Run(stage, **RUNS[name]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_saved_state_resumes_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, stage: int, size: int
) -> None:
    assert_resumes(pool, tmp_path, Run(stage), size)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (3, 1)])
def test_a_saved_state_goes_from_stage_to_stage_and_to_ddp(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    assert_resumes(pool, tmp_path, Run(before), then=Run(after))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_accelerates_own_class_at_stage_1_saves_what_was_consolidated(
    pool: Pool, tmp_path: Path, size: int
) -> None:
    assert_resumes(pool, tmp_path, Run(1, is_own=True), size)


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    with fresh():
        model = Net()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05)
        accelerator = Accelerator(cpu=True, zero_stage=2)
        with pytest.raises(ValueError, match=r"one model together with its .*, got 1 models and 0"):
            accelerator.prepare(model)
        wrapped, prepared = accelerator.prepare(model, optimizer)
        wrapped(samples()[0]).square().mean().backward()
        with pytest.raises(ValueError, match="all parameters of one sharded optimizer"):
            accelerator.clip_grad_norm_(model.last.parameters(), 1.0)
        accelerator.gradient_state._set_sync_gradients(False)
        with pytest.raises(ValueError, match=r"only if accelerator\.sync_gradients is true"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.gradient_state._set_sync_gradients(True)
        prepared.step()
        with pytest.raises(NotConsolidatedError, match="call consolidate_state_dict"):
            prepared.state_dict()
    with pytest.raises(ValueError, match="expected a stage of ZeRO, 1, 2 or 3, got 0"):
        Accelerator(cpu=True, zero_stage=0)
