"""Modules of a model that have an optimizer each, as those of a GAN, and are wrapped by themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zero_optim.ddp.full.module_hooks import PassHooks
from zero_optim.integrations.stages import WRAPPERS
from zero_optim.optimizer import ZeroRedundancyOptimizer


def wrap_parts(
    module: nn.Module,
    optimizers: Sequence[ZeroRedundancyOptimizer],
    stage: int,
    options: Mapping[str, Any],
) -> list[nn.Module]:
    """Wrap the modules of each optimizer by themselves; all ranks call. Keep the wrappers.

    ValueError if modules have parameters of two optimizers; or, at stage 3, if an optimizer has two modules.
    """
    parts = [_parts(module, set(optimizer.pieces())) for optimizer in optimizers]
    held = [param for some in parts for part in some for param in part.parameters() if param.requires_grad]
    trained = {param for param in module.parameters() if param.requires_grad}
    if len(held) != len(set(held)) or set(held) != trained:
        raise ValueError("each parameter that trains has one optimizer, and a module without those of others")
    if stage == 3 and any(len(some) != 1 for some in parts):
        raise ValueError("at stage 3 each optimizer has one module, as forward passes are those of a module")
    modules = [some[0] if len(some) == 1 else nn.ModuleList(some) for some in parts]
    return [WRAPPERS[stage](part, each, **options) for part, each in zip(modules, optimizers, strict=True)]


def _parts(module: nn.Module, params: set[Tensor]) -> list[nn.Module]:
    """List the outermost modules inside of one that train these parameters and no others."""
    parts = []
    for child in module.children():
        trained = {param for param in child.parameters() if param.requires_grad}
        if trained & params:
            parts += [child] if trained <= params else _parts(child, params)
    return parts


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """List the modules inside of one, or the one, that were wrapped at stage 3."""
    return [each for each in module.modules() if PassHooks.of(each) is not None]
