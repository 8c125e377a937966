"""Lightning trains at stages 1 to 3 as with its own `DDPStrategy`: bits, checkpoints, resume."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from frameworks import Block, Net, as_torchrun_says, assert_same, samples, sums_in_order, whole
from pool import Pool, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.integrations.lightning import ZeroStrategy
from zero_optim.step.partial import PartialGradient

AdamW = torch.optim.AdamW
ADAMW = {"lr": 0.05, "eps": 1e-3}  # which is not zero in 16 bits
Weights = dict[str, Tensor]


class Module(pl.LightningModule):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.net, self.stage = Net(), stage

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parts = [isinstance(param.grad, PartialGradient) for param in self.parameters()]
        assert any(parts) == (self.stage > 1 and dist.get_world_size() > 1)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    validation_step = test_step

    def configure_optimizers(self) -> Any:
        if self.stage:
            optimizer: Any = ZeroRedundancyOptimizer(self.parameters(), AdamW, **ADAMW)
        else:
            optimizer = AdamW(self.parameters(), **ADAMW)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@dataclass
class Fit:
    """A run: stage 0 is Lightning's own DDP with a plain optimizer."""

    stage: int
    epochs: int = 1
    resumes: str | None = None
    saves: str | None = None
    sharded: bool = False
    wrap: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    module: type[Module] = Module
    in_order: bool = False

    def strategy(self) -> DDPStrategy:
        common: dict[str, Any] = {
            "cluster_environment": TorchElasticEnvironment(),
            "process_group_backend": "gloo",
            **self.ddp,
        }
        if not self.stage:
            return DDPStrategy(**common)
        wrap = {"units": [Block], **self.wrap} if self.stage == 3 else self.wrap
        return ZeroStrategy(self.stage, wrap=wrap, sharded_checkpoints=self.sharded, **common)

    def trainer(self) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=self.strategy(),
            max_epochs=self.epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, **self.options},
        )

    def run(self) -> tuple[pl.Trainer, Module]:
        with as_torchrun_says(), sums_in_order(self.in_order):
            trainer, module = self.trainer(), self.module(self.stage)
            trainer.fit(module, batches(), ckpt_path=self.resumes)
            if self.saves:
                trainer.save_checkpoint(self.saves)
        return trainer, module

    def weights(self) -> Weights:
        return whole(self.run()[1])


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples()), batch_size=2)


def half_precision() -> dict[str, Any]:
    """A scaler, which begins with infinities; Lightning itself makes none on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler), "gradient_clip_val": 0.3}


OPTIONS: dict[str, Any] = {
    "plain": dict,
    "clipped": lambda: {"gradient_clip_val": 0.3},
    "clipped by value": lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.3},
    "bf16-true": lambda: {"precision": "bf16-true", "gradient_clip_val": 0.3},
    "16-mixed": half_precision,
    "16-true": lambda: {"precision": "16-true", "gradient_clip_val": 0.3},
    "64-true": lambda: {"precision": "64-true", "gradient_clip_val": 0.3},
    "accumulated": lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
}


@on_ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_trains_with_the_bits_of_ddp(stage: int, option: str) -> None:
    wrap = {"accumulate": "local"} if option == "accumulated" and stage > 1 else {}
    expected = Fit(0, options=OPTIONS[option]()).weights()
    assert_same(Fit(stage, wrap=wrap, options=OPTIONS[option]()).weights(), expected)


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_owners_add_up_what_lightning_accumulates(stage: int) -> None:
    options = OPTIONS["accumulated"]()
    expected = Fit(0, options=options).weights()
    assert_same(Fit(stage, options=options).weights(), expected, to_the_bit=False)


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_options_of_ddp_reach_the_wrapper(stage: int) -> None:
    common: dict[str, Any] = {
        "cluster_environment": TorchElasticEnvironment(),
        "process_group_backend": "gloo",
    }

    def fit(**options: Any) -> Any:
        run = Fit(stage)
        strategy = ZeroStrategy(stage, **common, **options)
        with as_torchrun_says(), mock.patch.object(Fit, "strategy", return_value=strategy):
            trainer, module = run.trainer(), Module(stage)
            wrappers: list[Any] = []
            trainer.callbacks.append(Noting(wrappers))  # type: ignore[attr-defined]
            trainer.fit(module, batches())
        return wrappers[0]

    wrapper = fit(find_unused_parameters=True)
    options = wrapper._options if stage == 3 else vars(wrapper)
    assert options["find_unused_parameters"] is True
    with pytest.raises(TypeError, match="bogus"):
        fit(bogus=1)
    with pytest.raises(ValueError, match="without a ddp_comm_hook"):
        fit(ddp_comm_hook=object())


class Noting(pl.Callback):
    """Keeps the wrapper that trains."""

    def __init__(self, wrappers: list[Any]) -> None:
        self.wrappers = wrappers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.wrappers.append(trainer.strategy.model)


# ---------------------------------------------------------------------- checkpoints


def run_weights(fit: Fit) -> Weights:
    return fit.weights()


def saved_and_resumed(pool: Pool, path: Path, fit: Fit, then: Fit, size: int) -> Weights:
    """Train on two ranks, save, and train on with ``size`` ranks."""
    fit.saves = then.resumes = str(path)
    pool.run(2, run_weights, fit)
    return pool.run(size, run_weights, then)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, stage: int, size: int
) -> None:
    again = Fit(0, epochs=2, in_order=size > 2 and stage > 1)
    expected = saved_and_resumed(pool, tmp_path / "ddp.ckpt", Fit(0), again, size)
    got = saved_and_resumed(pool, tmp_path / "zero.ckpt", Fit(stage), Fit(stage, epochs=2), size)
    assert_same(got, expected)
    files = [torch.load(tmp_path / name) for name in ("ddp.ckpt", "zero.ckpt")]
    assert_same(files[1]["state_dict"], files[0]["state_dict"])
    moments = [file["optimizer_states"][0]["state"] for file in files]
    assert moments[1].keys() == moments[0].keys()
    assert all(torch.equal(moments[1][i]["exp_avg"], moments[0][i]["exp_avg"]) for i in moments[0])
    assert files[1].keys() == files[0].keys()


@pytest.mark.parametrize(("before", "after"), [(0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (3, 1)])
def test_whole_checkpoints_go_from_stage_to_stage_and_to_ddp(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    expected = pool.run(2, run_weights, Fit(0, epochs=2))[0]
    got = saved_and_resumed(pool, tmp_path / "x.ckpt", Fit(before), Fit(after, epochs=2), 2)
    assert_same(got, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stages", [(1, 1), (2, 2), (3, 3), (2, 3), (3, 2)])
def test_sharded_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, stages: tuple[int, int], size: int
) -> None:
    before, after = (Fit(stage, sharded=True) for stage in stages)
    after.epochs = 2
    again = Fit(0, epochs=2, in_order=size > 2 and stages[1] > 1)
    expected = saved_and_resumed(pool, tmp_path / "ddp.ckpt", Fit(0), again, size)
    assert_same(saved_and_resumed(pool, tmp_path / "x", before, after, size), expected)
    assert (tmp_path / "x" / "manifest.json").exists()


@on_ranks(2)
def test_a_folder_is_loaded_by_a_strategy_that_is_told_so(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    Fit(2, sharded=True, saves=path).run()
    with pytest.raises(ValueError, match="is a folder: load with ZeroStrategy"):
        Fit(2, epochs=2, resumes=path).run()


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_best_checkpoint_is_kept_and_loads(tmp_path: Path, stage: int, sharded: bool) -> None:
    results = []
    for each in (0, stage):
        folder = tmp_path / str(each)
        best = ModelCheckpoint(folder, "{epoch}", monitor="loss", save_top_k=1, save_last=False)
        options = {"callbacks": [best], "enable_checkpointing": True}
        fit = Fit(each, epochs=3, sharded=sharded and each > 0, options=options)
        with as_torchrun_says():
            trainer, module = fit.trainer(), Module(each)
            trainer.fit(module, batches(), batches())
        dist.barrier()  # rank 0 removes the older ones
        assert [path.name for path in folder.iterdir()] == [Path(best.best_model_path).name]
        resumed = Fit(each, epochs=4, sharded=fit.sharded, resumes=best.best_model_path).weights()
        results.append((Path(best.best_model_path).name, best.best_model_score, whole(module), resumed))
    (name, score, trained, resumed), (got_name, got_score, got_trained, got_resumed) = results
    assert (got_name, got_score) == (name, score)
    assert_same(got_trained, trained)
    assert_same(got_resumed, resumed)


# ---------------------------------------------------------------------- evaluation, refusals


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_that_was_trained_can_be_tested(stage: int) -> None:
    results = []
    for each in (0, stage):
        trainer, module = Fit(each).run()
        with as_torchrun_says():
            results.append(trainer.test(module, batches(), verbose=False))
    assert results[1] == results[0]


@on_ranks(2)
def test_a_module_can_be_trained_again_but_not_at_stage_3() -> None:
    results = []
    for stage in (0, 1, 2):
        fit = Fit(stage)
        _, module = fit.run()
        with as_torchrun_says():
            fit.trainer().fit(module, batches())
        results.append(whole(module))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    fit = Fit(3)
    _, module = fit.run()
    with as_torchrun_says(), pytest.raises(ValueError, match="that has an optimizer already"):
        fit.trainer().fit(module, batches())


class Plain(Module):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters())


@on_ranks(2)
def test_a_plain_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a zero_optim\.ZeroRedundancyOptimizer, got AdamW"):
        Fit(2, module=Plain).run()
    with pytest.raises(ValueError, match="expected a stage of ZeRO, 1, 2 or 3, got 4"):
        ZeroStrategy(4)


def test_strategies_have_names() -> None:
    for stage in (1, 2, 3):
        strategy = StrategyRegistry.get(f"zero{stage}")
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.stage == stage
