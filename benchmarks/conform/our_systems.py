"""Ours, and DeepSpeed, whose engine does part of the loop by itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from conform.loops import GAMMA
from conform.systems import FSDP2, FairScaleOSS, FairScaleSharded, System, TorchZeRO
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)


class DeepSpeed(System):
    """DeepSpeed's engine with ZeRO stage 1, in float32: it keeps its masters in that dtype."""

    title = "DeepSpeed 1"
    package = "deepspeed"
    dtype = torch.float32
    lacks: ClassVar[dict[str, str]] = {
        "uneven": "it takes no part in Join",
        "scaler": "its scaler is for fp16",
    }
    takes_closures = False
    stage: ClassVar[int] = 1

    def build(self, optimizer_class: Callable[..., Any]) -> None:
        deepspeed = import_module("deepspeed")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.loop.passes,
            "gradient_clipping": self.loop.max_norm or 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = optimizer_class(self.groups(), **self.trial.options)
        schedule = ExponentialLR(optimizer, GAMMA) if self.loop.two_groups else None
        self.model, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=config, lr_scheduler=schedule
        )

    def part(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, scaler: Any) -> None:
        self.model.backward(loss)  # it divides by the number of passes
        self.model.step()  # it steps, clips and zeroes after the last one

    def clip(self, max_norm: float) -> float:
        return max_norm

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        pass

    def zero_grad(self) -> None:
        pass

    def schedule(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.model.load_checkpoint(str(folder))


class DeepSpeed2(DeepSpeed):
    """The same with stage 2."""

    title = "DeepSpeed 2"
    stage = 2


def ours(system: System, optimizer_class: Callable[..., Any]) -> ZeroRedundancyOptimizer:
    """Build our optimizer; the state of wrappers of optimizers cannot be saved."""
    options = system.trial.options | ({"allow_unsaved": True} if system.trial.wraps else {})
    return ZeroRedundancyOptimizer(system.groups(), optimizer_class, **options)


def save(system: System, folder: Path) -> None:
    """Save with our checkpoints."""
    checkpoint.save(folder / "saved", model=system.model, optimizer=system.optimizer)


def load(system: System, folder: Path) -> None:
    """Load what `save` wrote."""
    checkpoint.load(folder / "saved", model=system.model, optimizer=system.optimizer)


class Ours(System):
    """zero_optim: the optimizer and DDP."""

    title = "zero_optim 1"
    package = "zero_optim"

    def build(self, optimizer_class: Callable[..., Any]) -> None:
        self.optimizer = ours(self, optimizer_class)
        self.wrap()

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.module, find_unused_parameters=self.loop.is_frozen_late)

    def clip(self, max_norm: float) -> float:
        return float(self.optimizer.clip_grad_norm_(max_norm))

    save, load = save, load


class Ours2(Ours):
    """The same with gradients sharded."""

    title = "zero_optim 2"

    def wrap(self) -> None:
        unused = self.loop.is_frozen_late
        self.model = ShardedDataParallel(self.module, self.optimizer, find_unused_parameters=unused)


class Ours3(Ours):
    """The same with parameters sharded."""

    title = "zero_optim 3"

    def wrap(self) -> None:
        self.model = FullyShardedDataParallel(
            self.module,
            self.optimizer,
            units=list(self.module.blocks),
            find_unused_parameters=self.loop.is_frozen_late,
        )

    def weights(self) -> list[Tensor]:
        with unsharded(self.model, writes=False):
            return super().weights()


class OursOnFSDP2(FSDP2):
    """Ours on parameters that FSDP2 shards."""

    title = "zero_optim on FSDP2"
    package = "zero_optim"
    unkept: ClassVar[tuple[str, ...]] = ("heavyball", "schedulefree")  # by DCP: no names, train mode

    def build(self, optimizer_class: Callable[..., Any]) -> None:
        self.wrap()
        self.optimizer = ours(self, optimizer_class)

    def save(self, folder: Path) -> None:
        save(self, folder) if self.trial.package in self.unkept else super().save(folder)

    def load(self, folder: Path) -> None:
        load(self, folder) if self.trial.package in self.unkept else super().load(folder)


SYSTEMS: dict[str, type[System]] = {
    "ddp": System,
    "zero": TorchZeRO,
    "fsdp2": FSDP2,
    "ours-fsdp2": OursOnFSDP2,
    "oss": FairScaleOSS,
    "sharded-ddp": FairScaleSharded,
    "deepspeed1": DeepSpeed,
    "deepspeed2": DeepSpeed2,
    "ours1": Ours,
    "ours2": Ours2,
    "ours3": Ours3,
}
