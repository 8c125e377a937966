"""Modules of a model that are wrapped by themselves, as those of a GAN, with an optimizer each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from zero_optim.ddp.full.module_hooks import units_at, unsharded
from zero_optim.optimizer import ZeroRedundancyOptimizer


def wrap_parts(
    module: nn.Module,
    optimizers: Sequence[ZeroRedundancyOptimizer],
    wrap: Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module],
    *,
    one_each: bool,
) -> list[nn.Module]:
    """Wrap the modules of each optimizer by themselves; all ranks call, and keep the wrappers."""
    parts = [_parts(module, set(optimizer.pieces())) for optimizer in optimizers]
    held = [param for some in parts for part in some for param in part.parameters() if param.requires_grad]
    trained = {param for param in module.parameters() if param.requires_grad}
    if len(held) != len(set(held)) or set(held) != trained:
        raise ValueError(
            "expected each trainable parameter in one optimizer, and each optimizer with modules of its own "
            "that hold no parameters of another"
        )
    if one_each and any(len(some) != 1 for some in parts):
        raise ValueError(
            "at stage 3 expected one module for each optimizer, with all of its parameters: put its modules "
            "into one"
        )
    modules = [some[0] if len(some) == 1 else nn.ModuleList(some) for some in parts]
    return [wrap(part, optimizer) for part, optimizer in zip(modules, optimizers, strict=True)]


def _parts(module: nn.Module, params: set[Tensor]) -> list[nn.Module]:
    parts = []
    for child in module.children():
        trained = {param for param in child.parameters() if param.requires_grad}
        if trained & params:
            parts += [child] if trained <= params else _parts(child, params)
    return parts


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """List the modules inside of one, or the one, that were wrapped at stage 3."""
    return [each for each in module.modules() if units_at(each) is not None]


@contextmanager
def parts_unsharded(module: nn.Module) -> Iterator[None]:
    """Make all of them whole for the time of a ``with``; all ranks enter and leave it."""
    with ExitStack() as whole:
        for part in sharded_parts(module):
            whole.enter_context(unsharded(part))
        yield
