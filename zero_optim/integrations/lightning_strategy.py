"""What strategies of ``lightning`` and ``pytorch_lightning`` have in common, two packages of equal code."""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.checkpoint import load, peek, save
from zero_optim.ddp.full.in_use import units_of
from zero_optim.ddp.full.sharded_state import unsharded
from zero_optim.integrations.stages import WRAPPERS, check_stage, inner, sharded_parts, whole_state
from zero_optim.optimizer import ZeroRedundancyOptimizer

LIGHTNING = "lightning"  # in a folder's ``extra``: what is neither parameters nor optimizer state, as bytes

_Strategy: Any = object  # that of Lightning comes behind the mixin


class ZeroMixin(_Strategy):
    """Train at a stage of ZeRO: ``Trainer(strategy="zero2")`` is ``Trainer(strategy=ZeroStrategy(2))``.

    All ranks call each method. A folder of a checkpoint loads on any number of ranks and at any stage. A file
    has the keys and values of a run with ``DDPStrategy`` and the plain optimizer; either loads the other's.

    Args:
        stage: 1 shards the state, below PyTorch's DDP; 2 gradients too; 3 parameters too, with one optimizer.
        wrap: options of the wrapper of stage 2 or 3, such as ``{"units": [Block]}``.
        sharded_checkpoints: each rank writes what it owns into a folder, see `zero_optim.checkpoint`; else
            rank 0 writes a file. Takes one optimizer. Needed to load a folder.
        **options: those of ``DDPStrategy``.
    """

    _folder: Path | None = None
    _is_ending = False
    parts: Sequence[Any] = ()  # wrappers of modules with an optimizer each

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
        with ExitStack() as whole:  # all ranks enter and leave it
            for part in sharded_parts(self.lightning_module):
                whole.enter_context(unsharded(part))
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
            self.parts = _wrap_parts(module, optimizers, wrap, self.stage)

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
        if plugin is not None and self.stage > 1:
            plugin = copy.copy(plugin)  # of its own class, whose name is a checkpoint's key
            vars(plugin).update(clip_grad_by_norm=_clip)
        self._precision_plugin = plugin

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole model, at stage 3 with one optimizer on rank 0 alone; nothing for a folder."""
        if self.sharded_checkpoints:
            return {}
        state = whole_state(self.lightning_module, everywhere=False)
        whole: dict[str, Any] = super().lightning_module_state_dict() if state is None else state
        return whole

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return the whole state on rank 0; nothing for a folder."""
        return {} if self.sharded_checkpoints else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file on rank 0, or the folder."""
        if not self.sharded_checkpoints:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        filepath, rest = self.broadcast((str(filepath), buffer.getvalue()))
        has_state = "optimizer_states" in checkpoint
        optimizer = inner(self.optimizers[0]) if has_state else None
        save(filepath, model=self.model, optimizer=optimizer, extra={LIGHTNING: rest})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a file, or what Lightning itself has in a folder."""
        self._folder = Path(checkpoint_path) if Path(checkpoint_path).is_dir() else None
        if self._folder is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if not self.sharded_checkpoints:
            raise ValueError(f"{self._folder} is a folder: load with ZeroStrategy(sharded_checkpoints=True)")
        extra: Any = peek(self._folder).extra
        return torch.load(io.BytesIO(extra[LIGHTNING]), weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load parameters and buffers."""
        if self._folder is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            load(self._folder, model=self.model, random=False)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer's state."""
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            ours = inner(self.optimizers[0])
            load(self._folder, model=self.model, optimizer=ours, random=False)

    @property
    def lightning_module(self) -> Any:
        """The module; None at the end of a run, where Lightning moves it: a sharded one stays."""
        return None if self._is_ending else super().lightning_module

    def teardown(self) -> None:
        """End a run."""
        module = self.lightning_module
        if module is not None and units_of(module) is not None:
            self.model, self._is_ending = module, True
        try:
            super().teardown()
        finally:
            self.parts, self._is_ending = (), False


def _clip(optimizer: Any, clip_val: float) -> None:
    inner(optimizer).clip_grad_norm_(clip_val)


def register(registry: Any, strategy: Any) -> None:
    """Give a strategy names for `Trainer`, one for each stage."""
    for stage in (1, *WRAPPERS):
        registry.register(f"zero{stage}", strategy, f"ZeRO stage {stage} of zero_optim", stage=stage)


def _wrap_parts(
    module: nn.Module, optimizers: list[ZeroRedundancyOptimizer], wrap: Callable[..., nn.Module], stage: int
) -> list[nn.Module]:
    """Wrap the modules of each optimizer, as those of a GAN, by themselves; all ranks call."""
    parts = [_parts(module, set(optimizer.pieces())) for optimizer in optimizers]
    held = [param for some in parts for part in some for param in part.parameters() if param.requires_grad]
    trained = {param for param in module.parameters() if param.requires_grad}
    if len(held) != len(set(held)) or set(held) != trained:
        raise ValueError(
            "expected each trainable parameter in one optimizer, and each optimizer with modules of its own "
            "that hold no parameters of another"
        )
    if stage == 3 and any(len(some) != 1 for some in parts):
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
