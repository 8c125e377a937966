"""Lightning's checkpoints of sharded models: a file with everything, or a folder that all ranks write."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zero_optim.checkpoint import load, peek, save
from zero_optim.ddp.full.module_hooks import units_of
from zero_optim.integrations.stages import inner, whole_state

LIGHTNING = "lightning"  # in a folder's ``extra``: what is neither parameters nor optimizer state, as bytes


_Strategy: Any = object  # that of Lightning comes behind the mixin


class SavesSharded(_Strategy):
    """Saves and loads; all ranks call each method. A folder loads on any number of ranks and at any stage.

    A file has the keys and values of a run with ``DDPStrategy`` and the plain optimizer; either loads the
    other's.
    """

    sharded_checkpoints: bool
    _folder: Path | None = None
    _is_ending = False
    parts: Sequence[Any] = ()  # wrappers of modules with an optimizer each

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
