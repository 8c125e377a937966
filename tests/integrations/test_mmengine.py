"""mmengine trains at stages 1 to 3 as with its own DDP: bits, clipping, accumulation, validation, resume."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import (
    DATASETS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    RUNNERS,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworks import Net, as_torchrun_says, assert_same, samples, sums_in_order, whole
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


@MODELS.register_module("Gan")
class Gan(BaseModel):  # type: ignore[misc]
    """Steps a critic and a generator in turn, as mmengine's guide of GANs has it."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = Net()  # sets a seed
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "tensor") -> Any:
        return [self.net(inputs)]

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        inputs, real = self.data_preprocessor(data, True)
        loss = (self.critic(self.net(inputs).detach()) - self.critic(real)).mean()
        optim_wrapper["critic"].update_params(loss)
        loss = self.critic(self.net(inputs)).square().mean()
        optim_wrapper["net"].update_params(loss)
        optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


@DATASETS.register_module("Samples")
class Samples(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*samples())


@METRICS.register_module("MeanOutput")
class MeanOutput(BaseMetric):  # type: ignore[misc]
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [output.double().mean().item() for output in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"mean": sum(results) / len(results)}


@dataclass
class Run:
    """A config as mmengine's guide has it; stage 0 is its own runner with a plain optimizer."""

    stage: int
    folder: Path
    epochs: int = 1
    start: Path | None = None
    way: str = "resume"  # of the config; "resume()" and "load_checkpoint()" are called before `train`
    validates: bool = False
    in_order: bool = False
    model: str = "Model"
    ddp: str = "MMDistributedDataParallel"
    wrap: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    hooks: Sequence[Mapping[str, Any]] = ()

    def config(self) -> Config:
        optimizer: dict[str, Any] = {"type": "AdamW", "lr": 0.05, "weight_decay": 0.1, **self.optimizer}
        wrapper: dict[str, Any] = {"type": self.ddp, "device_ids": None}  # on the CPU
        if self.stage:
            optimizer = {"optimizer_type": "AdamW", **optimizer, "type": "ZeroOptimizer"}
        if self.stage > 1:
            wrapper = {"type": f"zero{self.stage}", **self.wrap}
        start = None if self.way.endswith("()") else self.start
        batches = {
            "batch_size": 2,
            "num_workers": 0,
            "dataset": {"type": "Samples"},
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "default_collate"},
        }
        validation = {"val_dataloader": batches, "val_cfg": {}, "val_evaluator": {"type": "MeanOutput"}}
        return Config(
            {
                "runner_type": "ZeroRunner" if self.stage else "Runner",
                "model": {"type": self.model},
                "model_wrapper_cfg": wrapper,
                "optim_wrapper": {"optimizer": optimizer, "clip_grad": {"max_norm": 0.3}, **self.optim},
                "param_scheduler": {"type": "StepLR", "step_size": 3, "gamma": 0.5, "by_epoch": False},
                "train_dataloader": batches,
                "train_cfg": {"by_epoch": True, "max_epochs": self.epochs},
                "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1}},
                "custom_hooks": [*self.hooks],
                "launcher": "pytorch",
                "resume": bool(start) and self.way == "resume",
                "load_from": str(start) if start else None,
                "work_dir": str(self.folder),
                "experiment_name": f"run {next(NUMBERS)}",
                "log_level": "ERROR",
                **(validation if self.validates else {}),
            }
        )

    def weights(self) -> Weights:
        # PyTorch since 2.6 reads no files with other classes, such as those of mmengine
        reads_all = mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
        with as_torchrun_says(), reads_all, sums_in_order(self.in_order):
            runner = RUNNERS.build(self.config())
            assert isinstance(runner, ZeroRunner) == bool(self.stage)
            model = runner.model.module if self.stage < 2 else runner.model
            if self.way.endswith("()"):
                getattr(runner, self.way[:-2])(str(self.start))
            runner.train()
            assert self.stage < 2 or self.model == "Gan" or isinstance(runner.model, WRAPPERS[self.stage])
            metrics = runner.message_hub.log_scalars.get("val/mean")
            means = {"mean": torch.from_numpy(metrics.data[0])} if self.validates else {}
            weights = {name.replace("module.", ""): value for name, value in whole(model).items()}
            return {**weights, **means}


def run_weights(run: Run) -> Weights:
    return run.weights()


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"optim": {"accumulative_counts": 2}, "wrap": {"accumulate": "local"}},
    "by value": {"optim": {"clip_grad": {"type": "value", "clip_value": 0.01}}},
    "validated": {"validates": True, "epochs": 2},
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


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_hook_may_average_weights_but_not_at_stage_3(tmp_path: Path, stage: int) -> None:
    averages: dict[str, Any] = {"hooks": [{"type": "EMAHook", "momentum": 0.1}], "validates": True}
    expected = Run(0, tmp_path / "ddp", **averages).weights()
    assert_same(Run(stage, tmp_path / "x", **averages).weights(), expected)
    dist.barrier()  # rank 0 writes
    files = [torch.load(tmp_path / name / "epoch_1.pth", weights_only=False) for name in ("ddp", "x")]
    assert_same(files[1]["ema_state_dict"], files[0]["ema_state_dict"])
    with pytest.raises(RuntimeError, match=r"For averages, .* give the optimizer ema_decay"):
        Run(3, tmp_path / "y", **averages).weights()


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
        again = Run(each, path, epochs=2, start=saved, in_order=not each and size > 2 and stage > 1)
        results.append(pool.run(size, run_weights, again)[0])
        states.append(torch.load(saved, weights_only=False))
    assert_same(results[1], results[0])
    before, after = (state["optimizer"]["state"] for state in states)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in before)
    assert_same(states[1]["state_dict"], states[0]["state_dict"])


@on_ranks(2)
@pytest.mark.parametrize("start", ["resume", "load_checkpoint"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loading_before_training_is_as_the_config_loads(tmp_path: Path, stage: int, start: str) -> None:
    saved = tmp_path / "x" / "epoch_1.pth"
    Run(stage, tmp_path / "x").weights()
    dist.barrier()  # rank 0 writes
    by_config = "resume" if start == "resume" else "load_from"
    expected = Run(stage, tmp_path / "y", epochs=2, start=saved, way=by_config).weights()
    assert_same(Run(stage, tmp_path / "z", epochs=2, start=saved, way=f"{start}()").weights(), expected)


@on_ranks(2)
def test_units_may_be_named_as_classes(tmp_path: Path) -> None:
    expected = Run(0, tmp_path / "ddp", validates=True).weights()
    run = Run(3, tmp_path / "x", validates=True, wrap={"units": ["Block"]})
    assert_same(run.weights(), expected)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_loaded_reach_masters(tmp_path: Path, stage: int) -> None:
    options: dict[str, Any] = {"epochs": 2, "optimizer": {"master_dtype": torch.float64}}
    saved = tmp_path / "x" / "epoch_1.pth"
    Run(stage, tmp_path / "x").weights()
    dist.barrier()  # rank 0 writes
    expected = Run(stage, tmp_path / "y", start=saved, way="load_checkpoint()", **options).weights()
    assert_same(Run(stage, tmp_path / "z", start=saved, way="load_from", **options).weights(), expected)


class WrapperOfEach:
    """Builds an optimizer for each of some modules."""

    names: tuple[str, ...] = ("net", "critic")

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: Any) -> OptimWrapperDict:
        wrappers = {}
        for name in self.names:
            params = [*getattr(model, "module", model).get_submodule(name).parameters()]
            optimizer = OPTIMIZERS.build({**self.cfg["optimizer"], "params": params})
            kind = OPTIM_WRAPPERS.get(self.cfg.get("type", "OptimWrapper"))
            wrappers[name] = kind(optimizer, clip_grad=self.cfg["clip_grad"])
        return OptimWrapperDict(**wrappers)


class WrapperOfLayers(WrapperOfEach):
    names = ("net.first", "net.blocks", "net.last")


OPTIM_WRAPPER_CONSTRUCTORS.register_module("WrapperOfEach", module=WrapperOfEach)
OPTIM_WRAPPER_CONSTRUCTORS.register_module("WrapperOfLayers", module=WrapperOfLayers)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gans_train_and_resume(pool: Pool, tmp_path: Path, stage: int, size: int) -> None:
    results, states = [], []
    for each in (0, stage):
        optim = {"constructor": "WrapperOfEach", "type": "ZeroOptimWrapper" if each else "OptimWrapper"}
        common: dict[str, Any] = {"model": "Gan", "optim": optim, "validates": True}
        common["ddp"] = "MMSeparateDistributedDataParallel"
        path = tmp_path / str(each)
        trained = pool.run(2, run_weights, Run(each, path, **common))[0]
        saved = path / "epoch_1.pth"
        file = torch.load(saved, weights_only=False)
        names = {name: name.replace("module.", "") for name in file["state_dict"]}
        assert each < 2 or list(names) == list(names.values())
        file["state_dict"] = {names[name]: value for name, value in file["state_dict"].items()}
        torch.save(file, saved)  # mmengine's wrapper of each module does not load the names that it saves
        again = Run(each, path, epochs=2, start=saved, **common)
        results.append((trained, pool.run(size, run_weights, again)[0]))
        states.append(file["optimizer"])
    for got, expected in zip(results[1], results[0], strict=True):
        assert_same(got, expected)
    for name in ("net", "critic"):
        before, after = (state[name]["state"] for state in states)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in before)


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_cannot_be_meant_is_refused(tmp_path: Path, stage: int) -> None:
    with pytest.raises(ValueError, match="a ZeroOptimWrapper clips, got OptimWrapper"):
        Run(stage, tmp_path, optim={"type": "OptimWrapper"}).weights()
    with pytest.raises(TypeError, match=r"expected a zero_optim\.ZeroRedundancyOptimizer, got AdamW"):
        Run(stage, tmp_path, optim={"optimizer": {"type": "AdamW", "lr": 0.1}}).weights()
    with pytest.raises(ValueError, match="a name of the registry OPTIMIZERS, got 'NoOptimizer'"):
        Run(stage, tmp_path, optimizer={"optimizer_type": "NoOptimizer"}).weights()
    plain = {"constructor": "WrapperOfEach", "type": "OptimWrapper"}
    with pytest.raises(ValueError, match="a ZeroOptimWrapper clips, got OptimWrapper"):
        Run(stage, tmp_path, model="Gan", optim=plain).weights()
    layers = {"constructor": "WrapperOfLayers"}
    with pytest.raises(ValueError, match="each parameter that trains has one optimizer"):
        Run(stage, tmp_path, model="Gan", optim=layers).weights()
