"""Accelerate: an ``Accelerator`` for each stage of ZeRO; the rest of a script stays as it is."""

from collections.abc import Iterable, Mapping
from typing import Any

import accelerate
from torch import Tensor, nn

from zero_optim.integrations.stages import check_stage, consolidate, inner, is_ours, whole_state, wrapped


class Accelerator(accelerate.Accelerator):
    """Prepares for a stage of ZeRO, clips, saves and loads; all ranks call these methods.

    Args:
        zero_stage: 1 shards the state, below PyTorch's DDP; 2 gradients too; 3 parameters too. ``prepare``
            then takes the model together with its optimizer, which has all parameters that train.
        wrap: options of the wrapper of stage 2 or 3, such as ``{"units": [Block]}``.
        **options: those of Accelerate.
    """

    _optimizers: list[Any]

    def __init__(
        self, *args: Any, zero_stage: int = 2, wrap: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        check_stage(zero_stage)
        self.zero_stage, self.wrap = zero_stage, dict(wrap or {})
        self._coming: Any = None  # the optimizer that prepare() was given
        super().__init__(*args, **options)

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare models, optimizers and so on, as Accelerate does."""
        ours = [inner(each) for each in args if is_ours(each)]
        models = [each for each in args if isinstance(each, nn.Module)]
        if self.zero_stage > 1 and (len(ours), len(models)) not in ((1, 1), (0, 0)):
            raise ValueError(
                f"stages 2 and 3 prepare one model together with its sharded optimizer, got {len(models)} "
                f"models and {len(ours)} sharded optimizers: call prepare() for each pair"
            )
        self._coming = ours[0] if ours else None
        try:
            return super().prepare(*args, **options)
        finally:
            self._coming = None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; at stages 2 and 3 in our wrapper, not in DDP."""
        if self._coming is None or self.zero_stage == 1 or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        return wrapped(self, model, self._coming, self.zero_stage, self.wrap)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of an optimizer's parameters; at stages 2 and 3 of all of them at once."""
        if self.zero_stage == 1:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self.sync_gradients:
            raise ValueError(
                "at stages 2 and 3 call clip_grad_norm_() only if accelerator.sync_gradients is true"
            )
        params = set(parameters)
        trained = {param for param in params if param.requires_grad}
        for ours in map(inner, filter(is_ours, self._optimizers)):
            if trained <= set(ours.pieces()) <= params:
                self.unscale_gradients()
                return ours.clip_grad_norm_(max_norm, norm_type)
        raise ValueError("at stages 2 and 3 pass clip_grad_norm_() all parameters of one sharded optimizer")

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Save everything, as Accelerate does; an optimizer's whole state on the ranks that write."""
        everywhere, optimizers = self.project_configuration.save_on_each_node, self._optimizers
        for each in optimizers:
            consolidate(each, everywhere=everywhere)
        # Meanwhile other ranks have no optimizers, of which they would not write anything.
        self._optimizers = optimizers if everywhere or self.is_main_process else []
        try:
            return super().save_state(*args, **options)
        finally:
            self._optimizers = optimizers

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return a model's state dict, of stage 3 on the main process alone (elsewhere empty)."""
        state = whole_state(model, everywhere=self.project_configuration.save_on_each_node)
        return super().get_state_dict(model, unwrap) if state is None else state
