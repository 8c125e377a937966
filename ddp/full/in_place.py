"""`fully_shard`: a module whose parameters are sharded, and which stays what it is."""

from typing import Any

from torch import nn

from zero_optim.ddp.full.module_hooks import PassHooks
from zero_optim.ddp.fully_sharded import FullyShardedDataParallel
from zero_optim.optimizer import ZeroRedundancyOptimizer


def fully_shard(
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None = None,
    **options: Any,  # noqa: ANN401 - those of the wrapper
) -> nn.Module:
    """Keep each parameter of a module on its owners alone, as `FullyShardedDataParallel` does, in place.

    The module keeps its class, and the names in its state dict. Call it as before; all ranks do::

        fully_shard(model, units=[*model.blocks])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    What the wrapper has beside the forward pass (``no_sync()``, ``metrics()``, ``units``,
    ``check_finished()``), `fully_sharded` gives. All ranks of the group call with the same arguments; it
    communicates.

    Args:
        module: what to train, the whole of it.
        optimizer: as in `FullyShardedDataParallel`.
        **options: likewise.

    Returns:
        The module.

    Raises:
        ValueError: on every rank: the module, or a part of it, is fully sharded already.
        Exception: likewise, as `FullyShardedDataParallel`.
    """
    wrapper = FullyShardedDataParallel(module, optimizer, **options)
    hooks = PassHooks.of(module)
    assert hooks is not None  # of the wrapper
    hooks.kept = wrapper
    return module


def fully_sharded(module: nn.Module) -> FullyShardedDataParallel:
    """Give the wrapper that a module was sharded by with `fully_shard`; does not communicate.

    Raises:
        ValueError: it was not.
    """
    hooks = PassHooks.of(module)
    if hooks is None or hooks.kept is None:
        raise ValueError(f"this {type(module).__name__} was not given to fully_shard()")
    return hooks.kept
