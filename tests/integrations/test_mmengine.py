"""mmengine trains at stages 1 to 3 as with its own DDP: bits, clipping, accumulation, resume."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, RUNNERS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworks import Net, as_torchrun_says, assert_same, samples, whole
from pool import Pool, on_ranks
from zero_optim.integrations.mmengine import ZeroRunner
from zero_optim.integrations.mmengine_parts import Zero2, Zero3

Weights = dict[str, Tensor]
WRAPPERS = {2: Zero2, 3: Zero3}
NUMBERS = itertools.count()  # mmengine keeps what it logs by the name of a run


@MODELS.register_module("Model")
class Model(BaseModel):  # type: ignore[misc]
    """As mmengine's guide has it; the first weights are set by `init_weights`."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = Net()

    def init_weights(self) -> None:
        nn.init.normal_(self.net.last.weight, generator=torch.Generator().manual_seed(3))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "tensor") -> Any:
        outputs = self.net(inputs)
        if mode == "loss":
            return {"loss": nn.functional.mse_loss(outputs, targets)}
        return [outputs] if mode == "predict" else outputs


@DATASETS.register_module("Samples")
class Samples(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*samples())


@dataclass
class Run:
    """A config as mmengine's guide has it; stage 0 is its own runner with a plain optimizer."""

    stage: int
    folder: Path
    epochs: int = 1
    resumes: Path | None = None
    loads: Path | None = None
    wrap: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        optimizer: dict[str, Any] = {"type": "AdamW", "lr": 0.05, "weight_decay": 0.1, **self.optimizer}
        wrapper: dict[str, Any] = {"type": "MMDistributedDataParallel", "device_ids": None}  # on the CPU
        if self.stage:
            optimizer.update(type="ZeroOptimizer", optimizer_type="AdamW")
        if self.stage > 1:
            wrapper = {"type": f"zero{self.stage}", **self.wrap}
        start = self.resumes or self.loads
        return Config(
            {
                "runner_type": "ZeroRunner" if self.stage else "Runner",
                "model": {"type": "Model"},
                "model_wrapper_cfg": wrapper,
                "optim_wrapper": {"optimizer": optimizer, "clip_grad": {"max_norm": 0.3}, **self.optim},
                "param_scheduler": {"type": "StepLR", "step_size": 3, "gamma": 0.5, "by_epoch": False},
                "train_dataloader": {
                    "batch_size": 2,
                    "num_workers": 0,
                    "dataset": {"type": "Samples"},
                    "sampler": {"type": "DefaultSampler", "shuffle": False},
                    "collate_fn": {"type": "default_collate"},
                },
                "train_cfg": {"by_epoch": True, "max_epochs": self.epochs},
                "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1}},
                "launcher": "pytorch",
                "resume": bool(self.resumes),
                "load_from": str(start) if start else None,
                "work_dir": str(self.folder),
                "experiment_name": f"run {next(NUMBERS)}",
                "log_level": "ERROR",
            }
        )

    def weights(self) -> Weights:
        # PyTorch since 2.6 reads no files with other classes, such as those of mmengine
        with as_torchrun_says(), mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"):
            runner = RUNNERS.build(self.config())
            assert isinstance(runner, ZeroRunner) == bool(self.stage)
            model = runner.model.module if self.stage < 2 else runner.model
            runner.train()
            assert self.stage < 2 or isinstance(runner.model, WRAPPERS[self.stage])
            return whole(model)


def run_weights(run: Run) -> Weights:
    return run.weights()


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"optim": {"accumulative_counts": 2}, "wrap": {"accumulate": "local"}},
    "by value": {"optim": {"clip_grad": {"type": "value", "clip_value": 0.01}}},
    "by parameter": {"optim": {"paramwise_cfg": {"norm_decay_mult": 0.0, "bias_lr_mult": 2.0}}},
}


@on_ranks(2)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_trains_with_the_bits_of_ddp(tmp_path: Path, stage: int, name: str) -> None:
    options = RUNS[name]
    assert_same(
        Run(stage, tmp_path / "x", **options).weights(), Run(0, tmp_path / "ddp", **options).weights()
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_resumes_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, stage: int, size: int
) -> None:
    results, states = [], []
    for each in (0, stage):
        path = tmp_path / str(each)
        pool.run(2, run_weights, Run(each, path))
        saved = path / "epoch_1.pth"
        results.append(pool.run(size, run_weights, Run(each, path, epochs=2, resumes=saved))[0])
        states.append(torch.load(saved, weights_only=False))
    assert_same(results[1], results[0], to_the_bit=size < 3)
    before, after = (state["optimizer"]["state"] for state in states)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in before)
    assert_same(states[1]["state_dict"], states[0]["state_dict"])
