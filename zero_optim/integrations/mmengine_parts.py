"""What mmengine builds by its registries: the optimizer, what steps and clips it, and wrappers of models."""

from collections.abc import Iterable
from typing import Any

from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS, OPTIMIZERS
from torch import Tensor, nn

from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel
from zero_optim.integrations.stages import inner
from zero_optim.optimizer import ZeroRedundancyOptimizer


def build_optimizer(params: Any, optimizer_type: str, **options: Any) -> ZeroRedundancyOptimizer:
    """Build an optimizer of a class that the registry knows; all ranks call."""
    kind: Any = OPTIMIZERS.get(optimizer_type)
    if kind is None:
        raise ValueError(
            f"expected optimizer_type to be a name of the registry OPTIMIZERS, got {optimizer_type!r}"
        )
    return ZeroRedundancyOptimizer(params, kind, **options)


OPTIMIZERS.register_module("ZeroOptimizer", module=build_optimizer)


class _Steps:
    """What loops call of a wrapper."""

    detect_anomalous_params = False
    train_step = MMDistributedDataParallel.train_step
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step
    _run_forward = MMDistributedDataParallel._run_forward


@MODEL_WRAPPERS.register_module("zero2")
class Zero2(_Steps, ShardedDataParallel):
    """``model_wrapper_cfg=dict(type="zero2")``, with options of `ShardedDataParallel`."""


@MODEL_WRAPPERS.register_module("zero3")
class Zero3(_Steps, FullyShardedDataParallel):
    """``dict(type="zero3")``, with options of `FullyShardedDataParallel`; ``units`` may name classes."""

    def __init__(self, module: nn.Module, optimizer: Any, *, units: Any = "auto", **options: Any) -> None:
        names = [] if isinstance(units, str) or not isinstance(units, Iterable) else [*units]
        if names and all(isinstance(name, str) for name in names):
            units = [each for each in module.modules() if type(each).__name__ in names]
        super().__init__(module, optimizer, units=units, **options)


@OPTIM_WRAPPERS.register_module()
class ZeroOptimWrapper(OptimWrapper):
    """An ``OptimWrapper`` that clips sharded gradients by their common norm; all ranks call."""

    def _clip_grad(self) -> None:
        if self.clip_func is not nn.utils.clip_grad_norm_:
            super()._clip_grad()
            return
        norm: Tensor = inner(self.optimizer).clip_grad_norm_(**self.clip_grad_kwargs)
        self.message_hub.update_scalar(f"train/{self.grad_name}", float(norm))
