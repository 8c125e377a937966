"""The lines of docs/frameworks.md in scripts that launchers start."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

LIGHTNING = """
import lightning.pytorch as pl, torch
import zero_optim.integrations.lightning
from frameworks import Net, samples
from zero_optim import ZeroRedundancyOptimizer

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=2)
    trainer = pl.Trainer(
        strategy="zero3", accelerator="cpu", devices=2, max_epochs=1, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Module(), loader)
    trainer.save_checkpoint("saved")
    trainer.save_checkpoint("again")
"""

PYTORCH_LIGHTNING = LIGHTNING.replace("lightning.pytorch", "pytorch_lightning").replace(
    "s.light", "s.pytorch_light"
)

TRANSFORMERS = """
import torch
from test_transformers import GPT2Block, Tokens, gpt2
from transformers import Trainer, TrainingArguments
from zero_optim.integrations.transformers import ZeroTrainer

class MyTrainer(ZeroTrainer, Trainer):
    zero_stage = 3
    wrap = {"units": [GPT2Block]}

args = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=1, report_to=[], optim="adamw_torch",
    save_strategy="epoch",
)
MyTrainer(gpt2(), args, train_dataset=Tokens()).train()
if args.should_save:
    torch.save(torch.load("out/checkpoint-6/optimizer.pt"), "saved")
"""

ACCELERATE = """
import torch
from frameworks import Net, samples
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.integrations.accelerate import Accelerator

accelerator = Accelerator(zero_stage=3, cpu=True, gradient_accumulation_steps=2)
model = Net()
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("state")
accelerator.save_model(model, "model")
if accelerator.is_main_process:
    torch.save(torch.load("state/optimizer.bin"), "saved")
accelerator.end_training()
"""

NO_ADAPTER = """
import torch
from test_transformers import Tokens, gpt2
from transformers import Trainer, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS
from zero_optim import ZeroRedundancyOptimizer

del DEFAULT_CALLBACKS[-1]  # that of the adapter, which the test of Trainer imports
args = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2, report_to=[],
    save_strategy="epoch",
)
options = {"optimizer_class": torch.optim.AdamW, "lr": 3e-4}
chosen = ZeroRedundancyOptimizer, options
Trainer(gpt2(), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=chosen).train()
"""


def launched(folder: Path, launcher: list[str], script: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(script)
    paths = [TESTS.parent, TESTS, TESTS / "integrations"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([*launcher, "script.py"], check=False, cwd=folder, env=environment, **options)


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        ([sys.executable], LIGHTNING),  # it starts the other ranks itself
        (TORCHRUN, LIGHTNING),
        (TORCHRUN, PYTORCH_LIGHTNING),
        (TORCHRUN, TRANSFORMERS),
        (TORCHRUN, ACCELERATE),
    ],
    ids=["lightning alone", "lightning", "pytorch_lightning", "transformers", "accelerate"],
)
def test_launched_scripts_train_and_save_all_state(tmp_path: Path, launcher: list[str], script: str) -> None:
    result = launched(tmp_path, launcher, script)
    assert result.returncode == 0, result.stdout + result.stderr
    saved = torch.load(tmp_path / "saved")
    state = saved["optimizer_states"][0] if "optimizer_states" in saved else saved
    indices = [index for group in state["param_groups"] for index in group["params"]]
    assert sorted(state["state"]) == sorted(indices)
    assert all("exp_avg" in entries for entries in state["state"].values())


def test_a_trainer_without_the_adapter_ends_on_every_rank_at_its_first_save(tmp_path: Path) -> None:
    result = launched(tmp_path, TORCHRUN, NO_ADAPTER)
    assert result.returncode != 0
    assert "NotConsolidatedError: the state is on its owners, and rank 0 has not" in result.stderr
    assert not list(tmp_path.rglob("optimizer.pt"))
