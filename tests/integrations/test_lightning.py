"""Lightning trains at stages 1 to 3 as with its own `DDPStrategy`: bits, checkpoints, resume."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import frameworks
from frameworks import (
    Block,
    Net,
    Weights,
    as_torchrun_says,
    assert_as_ddp,
    assert_resumes,
    assert_same,
    averages_in,
    samples,
    sums_in_order,
    whole,
)
from pool import Pool, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.integrations.lightning import ZeroStrategy
from zero_optim.step.partial import PartialGradient

AdamW = torch.optim.AdamW
ADAMW = {"lr": 0.05, "eps": 1e-3}  # which is not zero in 16 bits


class Module(pl.LightningModule):
    units: Any = (Block,)
    leaves_out = False  # a loss does without a part of the module

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.net, self.stage = Net(), stage
        self.wrappers: list[Any] = []

    def on_train_start(self) -> None:
        self.wrappers = [self.trainer.strategy.model]  # in a list, as it is no part of the module

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
class Fit(frameworks.Run):
    """A run of a trainer."""

    sharded: bool = False
    finds_unused: bool = False
    module: type[Module] = Module

    def strategy(self, **of_ddp: Any) -> DDPStrategy:
        """DDP wraps all, of which a loss may leave out a part; stages 2 and 3 wrap each part by itself."""
        finds = self.finds_unused or (self.module.leaves_out and self.stage < 2)
        of_ddp = {"process_group_backend": "gloo", "find_unused_parameters": finds, **of_ddp}
        of_ddp["cluster_environment"] = TorchElasticEnvironment()
        if not self.stage:
            return DDPStrategy(**of_ddp)
        wrap = {"units": self.module.units, **self.wrap} if self.stage == 3 else self.wrap
        return ZeroStrategy(self.stage, wrap=wrap, sharded_checkpoints=self.sharded, **of_ddp)

    def trainer(self, **of_ddp: Any) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=self.strategy(**of_ddp),
            max_epochs=self.epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, **self.options()},
        )

    def run(self, *validation: Any, **of_ddp: Any) -> tuple[pl.Trainer, Module]:
        with as_torchrun_says(), sums_in_order(self.in_order):
            trainer, module = self.trainer(**of_ddp), self.module(self.stage)
            trainer.fit(module, batches(), *validation, ckpt_path=self.resumes)
            if self.saves:
                trainer.save_checkpoint(self.saves)
        return trainer, module

    def weights(self) -> Weights:
        trainer, module = self.run()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = {"scale": torch.tensor(scaler.get_scale())} if scaler else {}
        return {**whole(module), **scale}

    def saved(self, path: Path) -> Weights:
        """The weights and averages of a file; nothing of a folder, which DDP does not write."""
        if self.sharded:
            return {}
        file = torch.load(path)
        content = {**file["state_dict"], **{f"key {name}": torch.tensor(0) for name in file}}
        for number, state in enumerate(file["optimizer_states"]):
            content |= {f"{number} {name}": value for name, value in averages_in(state).items()}
        return content


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
    assert_as_ddp(Fit(stage, wrap=wrap, options=OPTIONS[option]))


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_owners_add_up_what_lightning_accumulates(stage: int) -> None:
    assert_as_ddp(Fit(stage, options=OPTIONS["accumulated"]), to_the_bit=False)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, stage: int, size: int
) -> None:
    assert_resumes(pool, tmp_path, Fit(stage), size)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (3, 1)])
def test_whole_checkpoints_go_from_stage_to_stage_and_to_ddp(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    assert_resumes(pool, tmp_path, Fit(before), then=Fit(after))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 3), (2, 3), (3, 2)])
def test_sharded_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, before: int, after: int, size: int
) -> None:
    assert_resumes(pool, tmp_path, Fit(before, sharded=True), size, Fit(after, sharded=True))
    assert (tmp_path / "zero" / "manifest.json").exists()


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_best_checkpoint_is_kept_and_loads(tmp_path: Path, stage: int, sharded: bool) -> None:
    results = []
    for each in (0, stage):
        folder = tmp_path / str(each)
        best = ModelCheckpoint(folder, "{epoch}", monitor="loss", save_top_k=1, save_last=False)
        fit = Fit(
            each, 3, sharded=sharded, options=partial(dict, callbacks=[best], enable_checkpointing=True)
        )
        module = fit.run(batches())[1]
        dist.barrier()  # rank 0 removes the older ones
        path = Path(best.best_model_path)
        assert list(folder.iterdir()) == [path]
        resumed = Fit(each, 4, sharded=sharded, resumes=path).weights()
        results.append((path.name, best.best_model_score, whole(module), resumed))
    (name, score, trained, resumed), (got_name, got_score, got_trained, got_resumed) = results
    assert (got_name, got_score) == (name, score)
    assert_same(got_trained, trained)
    assert_same(got_resumed, resumed)


# ---------------------------------------------------------------------- evaluation, refusals


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_trainer_can_be_pickled(stage: int) -> None:
    trainer = pl.Trainer(strategy=ZeroStrategy(stage), accelerator="cpu", logger=False)
    for copied in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        plugin, other = trainer.precision_plugin, copied.precision_plugin
        assert type(other).clip_grad_by_norm is type(plugin).clip_grad_by_norm
        assert vars(other) == vars(plugin)
        assert copied.strategy.stage == stage


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
