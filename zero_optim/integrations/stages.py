"""What adapters share: the wrapper of a stage, and the optimizer inside of a framework's own object."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel, full_state_dict
from zero_optim.ddp.full.in_use import units_at
from zero_optim.ddp.full.sharded_state import units_in
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours

WRAPPERS: dict[int, Callable[..., nn.Module]] = {2: ShardedDataParallel, 3: FullyShardedDataParallel}


def check_stage(stage: object) -> None:
    """Raise ValueError for what is no stage of ZeRO."""
    if stage not in (1, *WRAPPERS):
        raise ValueError(f"expected a stage of ZeRO, 1, 2 or 3, got {stage!r}")


def is_ours(optimizer: Any) -> bool:
    """Whether a framework's object is, or wraps, a sharded optimizer of this library."""
    return isinstance(_unwrapped(optimizer), ZeroRedundancyOptimizer)


def inner(optimizer: Any) -> ZeroRedundancyOptimizer:
    """Return the sharded optimizer inside of frameworks' wrappers; else TypeError on every rank."""
    ours: ZeroRedundancyOptimizer = _unwrapped(optimizer)
    require_ours(ours)
    return ours


def consolidate(optimizer: Any, *, everywhere: bool) -> None:
    """Bring a sharded optimizer's whole state to rank 0, or to all; all call. Others and DTensors stay."""
    if is_ours(optimizer) and not inner(optimizer).core.inputs.held:
        inner(optimizer).consolidate_state_dict(to=None if everywhere else 0)


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """List the modules inside of one, or the one, that were wrapped at stage 3."""
    return [each for each in module.modules() if units_at(each) is not None]


def whole_state(model: nn.Module, *, everywhere: bool) -> dict[str, Any] | None:
    """Collect a stage-3 model's state on rank 0 or all, else empty; all call. None if not sharded."""
    parts = sharded_parts(model)
    if not parts:
        return None
    if len(parts) > 1:
        return model.state_dict()
    units = units_in(model, "this {name} is not fully sharded")
    return full_state_dict(model, ranks=range(units.gathers.group.size) if everywhere else [0]) or {}


def _unwrapped(wrapper: Any) -> Any:
    """Look inside wrappers of frameworks; some of them are instances of the class that they wrap."""
    if not isinstance(wrapper, Optimizer) or "core" in vars(wrapper):
        return wrapper
    inside = getattr(wrapper, "optimizer", None)
    return wrapper if inside is None else _unwrapped(inside)


def wrapped(
    accelerator: Any,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    stage: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """Wrap a model at stage 2 or 3, prepared for mixed precision, device and compiler; all ranks call."""
    model, handler = accelerator.prepare_model(model, evaluation_mode=True), accelerator.ddp_handler
    ddp_options = {} if handler is None else handler.to_kwargs()
    wrapper: Any = WRAPPERS[stage](model, optimizer, **{**ddp_options, **options})
    if handler is not None:
        handler.register_comm_hook(wrapper)  # raises if there is one
    wrapper._is_accelerate_prepared = True
    return wrapper  # type: ignore[no-any-return]
