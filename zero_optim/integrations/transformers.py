"""Hugging Face ``Trainer``: importing this module lets it save a `ZeroRedundancyOptimizer`.

Stage 1 needs no more than ``optimizer_cls_and_kwargs=(ZeroRedundancyOptimizer, {"optimizer_class": AdamW})``.
Stages 2 and 3 need a class: ``class MyTrainer(ZeroTrainer, Trainer)``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import transformers.trainer
from torch import nn, optim
from transformers import TrainerCallback

from zero_optim.ddp.full.in_use import units_of
from zero_optim.integrations.stages import check_stage, consolidate, inner, whole_state, wrapped
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.rows.row_values import left_freed


class ConsolidatesBeforeSaves(TrainerCallback):
    """Brings the whole state to the ranks that write it, before each save; every ``Trainer`` has one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Consolidate if a save comes next; all ranks call."""
        if control.should_save and not args.save_only_model:
            consolidate(kwargs["optimizer"], everywhere=args.save_on_each_node)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Consolidate if the metric may be the best yet, which decides about a save after this."""
        if args.save_strategy == "best" and not args.save_only_model:
            consolidate(kwargs["optimizer"], everywhere=args.save_on_each_node)


transformers.trainer.DEFAULT_CALLBACKS.append(ConsolidatesBeforeSaves)


_Trainer: Any = object  # that of transformers, or a class of it, comes behind the mixin


class ZeroTrainer(_Trainer):
    """A mixin, before ``Trainer`` or a class of it: trains at a stage of ZeRO, clips, saves and resumes.

    The optimizer is that of the arguments (``optim="adamw_torch"``), or of ``optimizer_cls_and_kwargs``.

    Attributes:
        zero_stage: 1 shards the state, below PyTorch's DDP; 2 gradients too; 3 parameters too.
        wrap: options of the wrapper of stage 2 or 3, such as ``{"units": [Block]}``.
    """

    zero_stage = 2
    wrap: Mapping[str, Any] = {}
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_stage(self.zero_stage)
        super().__init__(*args, **kwargs)
        self.remove_callback(ConsolidatesBeforeSaves)  # as this class saves

    def create_optimizer(self, model: Any = None) -> Any:
        """Build the optimizer that is asked for, sharded; all ranks call."""
        if self.optimizer is None:
            chosen = self.optimizer_cls_and_kwargs
            kind, options = chosen or self.get_optimizer_cls_and_kwargs(self.args, model or self.model)
            if not isinstance(kind, type) or not issubclass(kind, optim.Optimizer):
                raise TypeError(
                    f"expected an optimizer class, got {kind!r}, which Trainer takes for a factory"
                )
            if kind is not ZeroRedundancyOptimizer:
                options = {"optimizer_class": kind, **options}
            self.optimizer_cls_and_kwargs = ZeroRedundancyOptimizer, options
        return super().create_optimizer(model)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        model = super()._wrap_model(model, training, dataloader)
        if self.zero_stage == 1 or not training or isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        return wrapped(self.accelerator, model, inner(self.optimizer), self.zero_stage, self.wrap)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._norm(self.args.max_grad_norm) if self.zero_stage > 1 else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        is_known = grad_norm is not None or self.zero_stage == 1
        return super()._get_grad_norm(model, grad_norm) if is_known else self._norm(float("inf"))

    def _norm(self, max_norm: float) -> Any:
        self.accelerator.unscale_gradients()
        return inner(self.optimizer).clip_grad_norm_(max_norm)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model; all ranks call, though some versions of Trainer call `_save` on one alone."""
        self._whole = whole_state(self.model, everywhere=self.args.save_on_each_node)
        super().save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state_dict = state_dict or self.__dict__.pop("_whole")
        units = units_of(self.model)  # of which PEFT asks for names, not values, without communication
        with nullcontext() if units is None else left_freed(units.buckets):
            super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        consolidate(self.optimizer, everywhere=self.args.save_on_each_node)
        super()._save_optimizer_and_scheduler(output_dir)
