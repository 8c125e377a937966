"""Hooks on modules and parameters that make units whole when they are used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_optim.comm.agreement import raise_together
from zero_optim.compat.engine import eager, in_backward
from zero_optim.ddp.full.stand_ins import StandIns
from zero_optim.ddp.full.unit import Unit
from zero_optim.ddp.full.unit_choice import UnitChoice
from zero_optim.ddp.full.unit_members import UnitMembers
from zero_optim.ddp.full.units import UnitsInUse
from zero_optim.ddp.full.wide_state import hook_wide_state, wide_units
from zero_optim.ddp.reducer.graph import replaced, tensors_in
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.shard.claims import first_claim


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The hook in front of a call.

    Args:
        units: all of the model.
        unit: the one that is used.
        members: the parameters of the modules.
    """

    units: UnitsInUse
    unit: Unit
    members: UnitMembers

    @eager
    def __call__(self, _: nn.Module, *inputs: object) -> None:
        """Make the unit whole."""
        self.units.enter(self.unit, inputs)  # in any case, as the hook behind the call leaves it
        if self.units.is_outermost_call and torch.is_grad_enabled() and not in_backward():
            self.members.check()


@dataclass(frozen=True, slots=True, eq=False)
class _BeforeState:
    """The hook in front of a module's part of a state dict."""

    units: UnitsInUse
    unit: Unit

    def __call__(self, *_: object) -> None:
        """Make the unit whole, unless the dict is to show it as it is."""
        if not self.unit.is_left:
            self.units.enter(self.unit, tells=False)  # no hook would come behind it if it raised


@dataclass(frozen=True, slots=True, eq=False)
class _After:
    """The hook behind a call, also behind one that raised.

    A module may return a parameter, or a view of one. It would die with the unit, so a copy is handed on.
    """

    units: UnitsInUse
    unit: Unit

    @eager
    def __call__(self, module: nn.Module, inputs: object, output: object) -> object:
        """Free the unit, unless it is used on."""
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


@dataclass(eq=False)  # PyTorch sets an attribute on it
class _AfterStateDict:
    """The hook behind a module's part of a state dict: the values outlive the whole parameters."""

    units: UnitsInUse
    unit: Unit

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Copy the module's own parameters, and free the unit."""
        if self.unit.is_left:
            return
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found = state.get(prefix + name)
            if isinstance(found, Tensor) and found.data_ptr() == param.data_ptr():
                state[prefix + name] = found.detach().clone()
        self.units.leave(self.unit, None)


@dataclass(slots=True, eq=False)
class _Load:
    """The hooks in front of and behind the loading of a module: owners take over what was loaded.

    Attributes:
        stand_ins: see Note [Loads that replace parameters] in `zero_optim.ddp.full.stand_ins`.
    """

    units: UnitsInUse
    unit: Unit
    stand_ins: StandIns | None = None

    def before(self, module: nn.Module, *_: object) -> None:
        """Make the unit whole, unless the dict is loaded into it as it is."""
        self.break_off()  # if an exception has ended the load before
        if self.unit.is_left:
            return
        self.units.enter(self.unit, tells=False)  # no hook would come behind it if it raised
        self.stand_ins = StandIns(module, {param: param for param in self.unit.params})
        self.units.unfinished.append(self.break_off)

    def after(self, module: nn.Module, _: object) -> None:
        """Take over what this rank owns, and free the unit."""
        if self.stand_ins is None:
            return
        self.stand_ins.end(written=True)
        self.break_off()
        self.units.take_written(self.unit)
        self.units.leave(self.unit, None)

    def break_off(self) -> None:
        """Have the module find its own parameters again; what was loaded is dropped."""
        if self.stand_ins is not None:
            self.stand_ins.end(written=False)
            self.stand_ins = None
            self.units.unfinished.remove(self.break_off)


def hook_up(choice: UnitChoice, units: UnitsInUse) -> None:
    """Register the hooks of all modules that are units, or have parameters in one.

    Calls are hooked of units, and of modules with parameters of the outermost one, so that a model's other
    methods may call them. Inside other units calls are not hooked: that would break up their compiled graphs.

    Args:
        choice: modules and parameters.
        units: what the hooks call.
    """
    in_units = {param for unit in units.units for bucket in unit.buckets for param in bucket.params}
    number_of = {module: number for number, module in enumerate(choice.modules)}
    wide, members = wide_units(units), UnitMembers(choice.modules[0])
    for module in choice.modules[0].modules():
        used = {choice.unit_of[param] for param in module.parameters(recurse=False) if param in in_units}
        called = {number_of[module]} if module in number_of else used & {0}
        for number in sorted(called):
            _hook_calls(module, _Before(units, units.units[number], members))
        for number in sorted(used | called):
            if number in wide:
                hook_wide_state(module, wide[number])
            else:
                _hook_state(module, units, units.units[number])


def hook_params(units: UnitsInUse, trained: Sequence[Tensor]) -> list[RemovableHandle]:
    """Register the hooks of the parameters whose gradients are waited for, behind those of the reducer.

    Args:
        units: what the hooks call.
        trained: the parameters, in the order of their indices.
    """
    return [_hook_param(param, units, index) for index, param in enumerate(trained)]


def _hook_calls(module: nn.Module, before: _Before) -> None:
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(_After(before.units, before.unit), always_call=True)


def _hook_state(module: nn.Module, units: UnitsInUse, unit: Unit) -> None:
    load = _Load(units, unit)
    untyped: Any = module
    untyped.register_state_dict_pre_hook(_BeforeState(units, unit))
    untyped.register_state_dict_post_hook(_AfterStateDict(units, unit))
    untyped.register_load_state_dict_pre_hook(load.before)
    untyped.register_load_state_dict_post_hook(load.after)


def _hook_param(param: Tensor, units: UnitsInUse, index: int) -> RemovableHandle:
    told = weakly(units.gradient_came)  # Python's garbage collection does not see the hooks of a tensor

    def came(_: Tensor) -> None:
        told(index)

    untyped: Any = param
    handle: RemovableHandle = untyped.register_post_accumulate_grad_hook(came)
    return handle


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Find the units that a model, or a module of one, was divided into; None if there are none."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Before):
                return hook.units
    return None


def check_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a fully sharded model, or a module of one, got {type(model).__name__}")


def refuse_inner(module: nn.Module) -> None:
    """Refuse a module that lies inside a unit, where nobody looks after it alone.

    Raises:
        ValueError: it does.
    """
    if first_claim([*module.parameters()]) is not None:
        raise ValueError(
            f"this {type(module).__name__} lies inside a unit of a fully sharded model, which is made whole "
            "as one: give the module that is the unit, or one around it"
        )


def _units_in(module: nn.Module) -> UnitsInUse:
    check_module(module)
    units = units_of(module)
    if units is None:
        refuse_inner(module)
        raise ValueError(
            f"no parameter of this {type(module).__name__} is sharded: wrap the model in "
            "FullyShardedDataParallel first"
        )
    return units


@eager
def begin_anew(units: UnitsInUse) -> None:
    """Take note that the outermost call begins."""
    units.forget_calls()


@contextmanager
def unsharded(module: nn.Module, *, writes: bool = True) -> Iterator[None]:
    """Make the parameters of a module whole for the time of a ``with``; all ranks enter and leave it.

    Communicates: one broadcast for each owner, unit and dtype. Inside, parameters can be read, and written
    under ``torch.no_grad()``. When it ends, each owner takes over what was written on its own rank to
    its rows; what other ranks wrote there is dropped.

    Args:
        module: of a fully sharded model, or the wrapper itself.
        writes: False spares the owners the copy, where nothing was written.

    Raises:
        TypeError: it is no module. This and what follows is told to the other ranks, which raise too.
        ValueError: no module in it is fully sharded.
    """
    try:
        units = _units_in(module)
    except (TypeError, ValueError) as error:
        raise_together(error)  # the others wait
    found = (units.index_of(param) for param in module.parameters())
    numbers: Sequence[int] = sorted({number for number in found if number is not None})
    with units.whole(numbers, writes=writes):
        yield
