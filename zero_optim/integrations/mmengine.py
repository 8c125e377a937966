"""mmengine: a ``Runner`` for each stage of ZeRO; the import registers it, the optimizer and two wrappers.

The optimizer is ``dict(type="ZeroOptimizer", optimizer_type="AdamW", ...)``. Without ``model_wrapper_cfg`` it
trains at stage 1, below DDP; ``dict(type="zero2")`` shards gradients too, ``"zero3"`` parameters too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import mmengine.runner
from mmengine.device import get_device
from mmengine.model import convert_sync_batchnorm
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from torch import Tensor, nn

from zero_optim.integrations.mmengine_parts import ZeroOptimWrapper
from zero_optim.integrations.stages import consolidate, inner, whole_state
from zero_optim.integrations.wrapped_modules import wrap_parts
from zero_optim.optimizer import ZeroRedundancyOptimizer


class _Whole(nn.Module):
    """Stands in for a sharded model while rank 0 writes it."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return OrderedDict(self.state)


def _each(wrapper: OptimWrapper) -> list[OptimWrapper]:
    return [*wrapper.values()] if isinstance(wrapper, OptimWrapperDict) else [wrapper]


@RUNNERS.register_module()
class ZeroRunner(mmengine.runner.Runner):
    """``runner_type="ZeroRunner"``: trains at a stage of ZeRO, saves and resumes; arguments of ``Runner``."""

    model: Any
    _has_loaded: bool
    _is_initialized = False
    _options: dict[str, Any] | None = None  # of the wrapper that waits for the optimizer
    _parts: Sequence[nn.Module] = ()  # wrappers of modules with an optimizer each

    def wrap_model(self, model_wrapper_cfg: Any, model: nn.Module) -> Any:
        """Wrap at stage 1; the others need the optimizer."""
        if (model_wrapper_cfg or {}).get("type") not in ("zero2", "zero3"):
            return super().wrap_model(model_wrapper_cfg, model)
        self._options = {**model_wrapper_cfg}
        model, sync_bn = model.to(get_device()), self.cfg.get("sync_bn")
        return convert_sync_batchnorm(model, sync_bn) if sync_bn else model

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Set first weights if none were loaded, build the optimizer, then wrap; all ranks call."""
        if not (self._has_loaded or self._is_initialized):
            super()._init_model_weights()
            self._is_initialized = True
        if not isinstance(optim_wrapper, OptimWrapper) and "optimizer" in optim_wrapper:
            optim_wrapper = {"type": "ZeroOptimWrapper", **optim_wrapper}
        wrapper = super().build_optim_wrapper(optim_wrapper)
        if self._options is not None:
            wrappers = _each(wrapper)
            for each in wrappers:
                if not isinstance(each, ZeroOptimWrapper) and each.clip_grad_kwargs:
                    raise ValueError(f"at stages 2 and 3 a ZeroOptimWrapper clips, got {type(each).__name__}")
            self._wrap([inner(each.optimizer) for each in wrappers], self._options)
            self._options = None
        return wrapper

    def _wrap(self, optimizers: list[ZeroRedundancyOptimizer], options: dict[str, Any]) -> None:
        """Wrap the model; with several optimizers the modules of each."""

        def wrap(module: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
            return MODEL_WRAPPERS.build({**options, "module": module, "optimizer": optimizer})

        if len(optimizers) == 1:
            self.model = wrap(self.model, optimizers[0])
        else:
            self._parts = wrap_parts(self.model, optimizers, wrap, one_each=options["type"] == "zero3")

    def _init_model_weights(self) -> None:
        """Do nothing: it is done before the optimizer is built."""

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **options: Any) -> None:
        """Write a file on rank 0, with everything that a run with DDP and the plain optimizer writes."""
        model = self.model
        for each in _each(self.optim_wrapper):
            consolidate(each.optimizer, everywhere=False)
        state = whole_state(model, everywhere=False)
        if state is not None:
            self.model = _Whole(state)
        try:
            super().save_checkpoint(out_dir, filename, *args, **options)
        finally:
            self.model = model
