"""Hooks on modules that make units whole when they are called; `unsharded` does on request.

Note [A call inside a call]
    A module may call itself, and only the outermost call is a forward pass. `UnitsInUse` counts calls. But
    PyTorch runs no hook when a Ctrl-C ends a call, and a notebook keeps its traceback, and with it the
    frames. Only the interpreter knows which calls are running. So the stack is searched, but only where the
    count says that a call lies in another.
"""

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import raise_together
from zero_optim.compat.engine import eager, in_backward
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.ddp.full.guards import UnitMembers
from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.state_hooks import UnitValues, hook_states
from zero_optim.ddp.full.unit import Unit
from zero_optim.ddp.reducer.graph import replaced, tensors_in
from zero_optim.shard.registration import is_registered
from zero_optim.shard.row_bucket import Uncopied

if TYPE_CHECKING:
    from zero_optim.ddp.fully_sharded import FullyShardedDataParallel


@dataclass(frozen=True, slots=True, eq=False)
class _CallHooks:
    units: UnitsInUse
    unit: Unit

    @eager
    def before(self, _: nn.Module, *inputs: object) -> None:
        self.units.enter(self.unit, inputs)  # in any case, as the hook behind the call leaves it
        if self.units.is_outermost_call and torch.is_grad_enabled() and not in_backward():
            self.units.members.check()

    @eager
    def after(self, _: nn.Module, __: object, output: object) -> object:
        """Free the unit, unless it is used on. Copies a returned view of a parameter, which would die."""
        unit, still = self.unit, False
        if unit.depth == 1 and any(map(unit.shares_memory, tensors_in(output))):
            output = replaced(output, lambda tensor: tensor.clone() if unit.shares_memory(tensor) else tensor)
            still = any(map(unit.shares_memory, tensors_in(output)))
        self.units.leave(unit, output)
        if still:
            raise RuntimeError(
                f"{unit.name} returned a view of a parameter in a {type(output).__name__}, where no copy can "
                "take its place: return a clone of it, as the parameter's memory goes when the call is over"
            )
        return output


def hook_up(choice: UnitChoice, units: UnitsInUse) -> None:
    """Register the hooks of all modules that are units, or have parameters in one."""
    in_units = {param for unit in units.units for param in unit.params}
    number_of = {module: number for number, module in enumerate(choice.modules)}
    values = [UnitValues(units, unit) for unit in units.units]
    units.members = UnitMembers(choice.modules[0])
    for module in choice.modules[0].modules():
        used = {choice.unit_of[param] for param in module.parameters(recurse=False) if param in in_units}
        numbers = {number_of[module]} if module in number_of else used & {0}
        for number in sorted(numbers):
            hooks = _CallHooks(units, units.units[number])
            module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
            module.register_forward_hook(hooks.after, always_call=True)
        for number in sorted(used | numbers):
            hook_states(module, values[number])


class PassHooks(Uncopied):
    """Hooks of a module that call its wrapper around a forward pass; `keepalive` keeps that alive."""

    def __init__(self, wrapper: "FullyShardedDataParallel") -> None:
        self._wrapper = weakref.ref(wrapper)
        self.keepalive: FullyShardedDataParallel | None = None

    def hang_on(self, module: nn.Module) -> None:
        """Register the hooks, in front of those of units and behind them."""
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after)

    @staticmethod
    def of(module: nn.Module) -> "PassHooks | None":
        """Return those of a module, if it has some."""
        owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, PassHooks)), None)

    @eager
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Prepare the inputs, and send buffers."""
        wrapper = self._wrapper_of_pass(module)
        return None if wrapper is None else wrapper.before_forward(args, kwargs)

    @eager
    def after(self, module: nn.Module, _: object, output: object) -> object:
        """Prepare for the backward pass; not called if the module has raised."""
        wrapper = self._wrapper_of_pass(module)
        return output if wrapper is None else wrapper.after_forward(output)

    def _wrapper_of_pass(self, module: nn.Module) -> "FullyShardedDataParallel | None":
        wrapper = self._wrapper()
        is_inner = wrapper is not None and wrapper.units.is_called and _num_calls(module) > 1
        return None if is_inner else wrapper


def _num_calls(module: nn.Module) -> int:
    """Count the running calls of a module in this thread: Note [A call inside a call]."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Return the units of a model, or of one that a module is in; None if there are none."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, _CallHooks):
                return owner.units
    return None


def units_in(module: object, hint: str) -> UnitsInUse:
    """Return the units of a module of a fully sharded model; TypeError or ValueError if there are none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a fully sharded model, or a module of one, got {type(module).__name__}")
    units = units_of(module)
    if units is not None:
        return units
    if any(map(is_registered, module.parameters())):
        raise ValueError(
            f"this {type(module).__name__} lies inside a unit of a fully sharded model, which is made whole "
            "as one: give the module that is the unit, or one around it"
        )
    raise ValueError(hint.format(name=type(module).__name__))


def units_in_together(module: object, hint: str) -> UnitsInUse:
    """Return `units_in`; all ranks call, and all raise if one does."""
    try:
        return units_in(module, hint)
    except (TypeError, ValueError) as error:
        raise_together(error)  # the others wait


@contextmanager
def unsharded(module: nn.Module, *, writes: bool = True) -> Iterator[None]:
    """Make the parameters of a module whole for the time of a ``with``; all ranks enter and leave it.

    Communicates: one broadcast for each owner, unit and dtype. Inside, parameters can be read, and written
    under ``torch.no_grad()``. When it ends, each owner takes over what was written on its own rank to its
    rows; what other ranks wrote there is dropped.

    Args:
        module: of a fully sharded model, or the wrapper itself.
        writes: False spares the owners the copy, where nothing was written.

    Raises:
        TypeError: on every rank: it is no module on any.
        ValueError: likewise: no module in it is fully sharded.
    """
    hint = "no parameter of this {name} is sharded: wrap the model in FullyShardedDataParallel first"
    units = units_in_together(module, hint)
    params = set[Tensor](module.parameters())
    numbers = [unit.number for unit in units.units if not params.isdisjoint(unit.params)]
    with units.whole(numbers, writes=writes):
        yield
