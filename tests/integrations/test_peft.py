"""LoRA by PEFT trains, saves and resumes in Lightning and Accelerate as with their DDP."""

from pathlib import Path

import peft
import pytest
import torch
from test_accelerate import Run
from test_lightning import Fit, Module
from torch import nn

from frameworks import Net, assert_resumes, assert_same, fresh, samples, whole
from pool import Pool, on_ranks
from zero_optim import ZeroRedundancyOptimizer


def adapted() -> nn.Module:
    model = Net()  # sets a seed
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["inner"], modules_to_save=["last"])
    )


class Adapted(Module):
    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.net = adapted()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_train_and_resume_in_lightning(
    pool: Pool, tmp_path: Path, stage: int, sharded: bool, size: int
) -> None:
    assert_resumes(pool, tmp_path, Fit(stage, sharded=sharded, module=Adapted), size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_train_and_resume_in_accelerate(pool: Pool, tmp_path: Path, stage: int, size: int) -> None:
    assert_resumes(pool, tmp_path, Run(stage, model=adapted), size)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_saves_adapters_that_peft_loads(tmp_path: Path, stage: int) -> None:
    with fresh():
        accelerator, model = Run(stage).accelerator(), adapted()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
        wrapped, prepared = accelerator.prepare(model, optimizer)
        accelerator.backward(wrapped(samples()[0]).square().mean())
        prepared.step()
        saves = accelerator.is_main_process
        accelerator.unwrap_model(wrapped).save_pretrained(tmp_path, is_main_process=saves)
        accelerator.wait_for_everyone()
        loaded = peft.PeftModel.from_pretrained(Net(), tmp_path)
        assert_same(dict(loaded.state_dict()), whole(model))
