"""Frameworks train, save and resume models that FSDP2 shards: the bits of Muon and AdamW unsharded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from lightning.pytorch.strategies import ModelParallelStrategy
from test_lightning import batches
from test_peft import adapted
from test_transformers import Tokens, gpt2
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerCallback, TrainingArguments

from frameworks import Net, as_torchrun_says, fresh, samples
from fsdp2 import assert_equal, recipes, take_gradients
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer

MUON, ADAMW = {"lr": 0.02}, {"lr": 0.05, "eps": 1e-3}


def divided(model: nn.Module) -> Iterator[list[Tensor]]:
    """Give the matrices, then the rest, of what trains."""
    trained = [param for param in model.parameters() if param.requires_grad]
    yield [param for param in trained if param.ndim == 2]
    yield [param for param in trained if param.ndim != 2]


def muon_and_adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    matrices, the_rest = divided(model)
    of_muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "cost": "matmul", **MUON}
    optimizer = ZeroRedundancyOptimizer([of_muon, {"params": the_rest}], torch.optim.AdamW, **ADAMW)
    assert recipes(optimizer) == {"whole", "rows"}
    return optimizer


class Twin:
    """A copy of an unsharded model, which steps with the gradients of the sharded one."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_steps = copy.deepcopy(model), 0
        matrices, the_rest = divided(self.model)
        self.optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(the_rest, **ADAMW)]

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Step whenever the optimizer does."""
        optimizer.register_step_pre_hook(lambda *_: self.step(model, optimizer))

    def step(self, model: nn.Module, optimizer: Any) -> None:
        """Step as the optimizer's groups say."""
        take_gradients(self.model, model)
        for own, group in zip(self.optimizers, optimizer.param_groups, strict=True):
            own.param_groups[0]["lr"] = group["lr"]
            own.step()
        self.num_steps += 1


@contextmanager
def accelerate_on_cpus() -> Iterator[None]:
    """Accelerate, and Trainer by it, shard on accelerators alone: say that these are some."""
    construct = AcceleratorState.__init__

    def constructed(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        construct(state, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.fsdp_plugin, kind = fsdp_plugin, DistributedType.FSDP
            state.distributed_type = PartialState._shared_state["distributed_type"] = kind

    with fresh(), mock.patch.object(AcceleratorState, "__init__", constructed):
        yield


def accelerated(twin: Twin, model: nn.Module, folder: Path, resumes: bool) -> nn.Module:
    with accelerate_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        model = fsdp2_prepare_model(accelerator, model)
        optimizer: Any = muon_and_adamw(model)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        ours = optimizer
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, batches())
        if resumes:
            accelerator.load_state(str(folder))
        twin.follow(model, ours)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
        return model


@on_ranks(2)
def test_accelerate_trains_and_resumes(tmp_path: Path) -> None:
    twin = Twin(Net())
    for resumes in (False, True):
        assert_equal(accelerated(twin, Net(), tmp_path, resumes), twin.model)
    assert twin.num_steps == 6


class Module(pl.LightningModule):
    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.net, self.twin = Net(), [twin]  # in a list, as it is no part of the module

    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = muon_and_adamw(self.net)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:  # type: ignore[override]
        self.clip_gradients(optimizer, **options)
        self.twin[0].step(self.net, optimizer)


def fitted(twin: Twin, folder: Path, resumes: bool, is_whole: bool) -> nn.Module:
    with as_torchrun_says():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(
                data_parallel_size=dist.get_world_size(),
                tensor_parallel_size=1,
                save_distributed_checkpoint=not is_whole,
                process_group_backend="gloo",
            ),
            max_epochs=2 if resumes else 1,
            gradient_clip_val=0.3,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module(twin)
        path = folder / "saved"
        trainer.fit(module, batches(), ckpt_path=path if resumes else None)
        if not resumes:
            trainer.save_checkpoint(path)
        return module.net


@on_ranks(2)
@pytest.mark.parametrize("is_whole", [False, True], ids=["sharded", "whole"])
def test_lightning_trains_and_resumes(tmp_path: Path, is_whole: bool) -> None:
    twin = Twin(Net())
    for resumes in (False, True):
        assert_equal(fitted(twin, tmp_path, resumes, is_whole), twin.model)
    assert twin.num_steps == 6


class Sharded(Trainer):
    """Shards the model before the optimizer is built."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = muon_and_adamw(fsdp2_prepare_model(self.accelerator, self.model))
        return self.optimizer


class Follows(TrainerCallback):
    def __init__(self, twin: Twin) -> None:
        self.twin = twin

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **more: Any) -> None:
        self.twin.follow(model, optimizer.optimizer)


def trained(twin: Twin, folder: Path, resumes: bool) -> nn.Module:
    with accelerate_on_cpus():
        args = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            ddp_backend="gloo",
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["GPT2Block"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
            per_device_train_batch_size=2,
            num_train_epochs=2,
            max_steps=12 if resumes else 6,
            ignore_data_skip=True,
            save_strategy="epoch",
            max_grad_norm=0.3,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Sharded(gpt2(), args, train_dataset=Tokens(), callbacks=[Follows(twin)])
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6") if resumes else None)
        return trainer.model


@on_ranks(2)
def test_trainer_trains_and_resumes(tmp_path: Path) -> None:
    twin = Twin(gpt2())
    for resumes in (False, True):
        assert_equal(trained(twin, tmp_path, resumes), twin.model)
    assert twin.num_steps == 12


@on_ranks(2, 3)
def test_adapters_of_peft_train_and_the_base_stays(tmp_path: Path) -> None:
    twin, model = Twin(adapted()), adapted()
    before = {name: value.clone() for name, value in twin.model.named_parameters()}
    for block in model.base_model.model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = muon_and_adamw(model)
    for step in range(3):
        model(samples()[0][dist.get_rank() :: 3] * (1 + step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        twin.step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert_equal(model, twin.model)
    names = {name for name, value in twin.model.named_parameters() if not torch.equal(value, before[name])}
    assert names == {name for name, value in model.named_parameters() if value.requires_grad}
