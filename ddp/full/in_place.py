"""`fully_shard`: a module whose parameters are sharded, and which stays what it is."""

import inspect
from typing import Any

from torch import nn

from zero_optim.compat.engine import eager
from zero_optim.ddp.full.unit_hooks import begin_anew
from zero_optim.ddp.fully_sharded import FullyShardedDataParallel
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.uncopied import Uncopied


class _Controller(FullyShardedDataParallel):
    """A wrapper that the module itself calls, by its hooks."""

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the module, whose hooks do the rest."""
        return self.module(*inputs, **kwargs)


class _ForwardHooks(Uncopied):
    """What a wrapper does before and after the forward pass of its module, hung on the module itself.

    A module may call itself, and only the outermost call counts. It is found on the stack: a counter would
    be wrong for ever after a Ctrl-C, for which PyTorch calls no hook.

    Args:
        controller: the wrapper.
    """

    def __init__(self, controller: _Controller) -> None:
        self.controller = controller

    @eager
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Prepare the inputs, and send buffers."""
        if _num_calls(module) > 1:
            return None
        untyped: Any = self.controller
        begin_anew(self.controller.units)
        return untyped._pre_forward(*args, **kwargs)

    @eager
    def after(self, module: nn.Module, args: object, output: object) -> object:
        """Prepare for the backward pass; not called if the module has raised."""
        return output if _num_calls(module) > 1 else self.controller._post_forward(output)


def _num_calls(module: nn.Module) -> int:
    """Count the calls of a module that are under way in this thread, this one included."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


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
    hooks = _ForwardHooks(_Controller(module, optimizer, **options))
    module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    module.register_forward_hook(hooks.after)
    return module


def fully_sharded(module: nn.Module) -> FullyShardedDataParallel:
    """Give the wrapper that a module was sharded by with `fully_shard`; does not communicate.

    Raises:
        ValueError: it was not.
    """
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _ForwardHooks):
            return owner.controller
    raise ValueError(f"this {type(module).__name__} was not given to fully_shard()")
