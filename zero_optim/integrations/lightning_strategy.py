"""What strategies of ``lightning`` and ``pytorch_lightning`` have in common, two packages of equal code."""

import copy
from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

from zero_optim.integrations.lightning_checkpoints import SavesSharded
from zero_optim.integrations.stages import WRAPPERS, check_stage, inner
from zero_optim.integrations.wrapped_modules import parts_unsharded, wrap_parts


class ZeroMixin(SavesSharded):
    """Train at a stage of ZeRO: ``Trainer(strategy="zero2")`` is ``Trainer(strategy=ZeroStrategy(2))``.

    Args:
        stage: 1 shards the state, below PyTorch's DDP; 2 gradients too; 3 parameters too, with one optimizer.
        wrap: options of the wrapper of stage 2 or 3, such as ``{"units": [Block]}``.
        sharded_checkpoints: each rank writes what it owns into a folder, see `zero_optim.checkpoint`; else
            rank 0 writes a file. Takes one optimizer. Needed to load a folder.
        **options: those of ``DDPStrategy``.
    """

    def __init__(
        self,
        stage: int = 2,
        *,
        wrap: Mapping[str, Any] | None = None,
        sharded_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        check_stage(stage)
        self.stage, self.wrap, self.sharded_checkpoints = stage, dict(wrap or {}), sharded_checkpoints
        super().__init__(**options)
        own = signature(super().__init__).parameters
        self.options_of_ddp = {name: value for name, value in options.items() if name not in own}
        if stage > 1 and options.get("ddp_comm_hook") is not None:
            raise ValueError("stages 2 and 3 reduce gradients to their owners, without a ddp_comm_hook")

    def setup(self, trainer: Any) -> None:
        """Set up a run; a module that ``fit`` has sharded can be evaluated afterwards."""
        with parts_unsharded(self.lightning_module):
            super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wrap at stage 1; the others need the optimizer."""
        if self.stage == 1:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Build optimizers and schedulers, then wrap; all ranks call."""
        super().setup_optimizers(trainer)
        optimizers = [inner(each) for each in self.optimizers]
        if len(optimizers) != 1 and self.sharded_checkpoints:
            raise ValueError(f"sharded checkpoints take one optimizer, got {len(optimizers)}")
        if self.stage == 1:
            return
        module, options = self.lightning_module, {**self.options_of_ddp, **self.wrap}
        wrap = partial(WRAPPERS[self.stage], **options)
        if module.automatic_optimization or (self.stage == 2 and len(optimizers) == 1):
            self.model = wrap(module, optimizers[0])
        else:
            self.parts = wrap_parts(module, optimizers, wrap, one_each=self.stage == 3)

    def pre_backward(self, closure_loss: Any) -> None:
        """Begin a pass; raises what a pass before has found late, on a GPU."""
        for part in self.parts if self.stage == 2 else ():  # others look when they are called
            part.reducer.own.check_finished(waits=False)
        super().pre_backward(closure_loss)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin; at stages 2 and 3 a copy of it that lets the optimizer clip."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and self.stage > 1 and not isinstance(plugin, _Clips):
            plugin = _clipping(copy.copy(plugin))
        self._precision_plugin = plugin


class _Clips:
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        inner(optimizer).clip_grad_norm_(clip_val)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would look for the class by its name
        plugin: Any = object.__new__(type(self).__mro__[2])
        vars(plugin).update(vars(self))
        return _clipping, (plugin,)


def _clipping(plugin: Any) -> Any:
    """Let the optimizer clip for a precision plugin."""
    kind = type(plugin)
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}  # a checkpoint's key
    plugin.__class__ = type(kind.__name__, (_Clips, kind), names)
    return plugin


def register(registry: Any, strategy: Any) -> None:
    """Give a strategy names for `Trainer`, one for each stage."""
    for stage in (1, *WRAPPERS):
        registry.register(f"zero{stage}", strategy, f"ZeRO stage {stage} of zero_optim", stage=stage)
