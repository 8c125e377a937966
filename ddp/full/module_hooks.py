"""The modules of units, with hooks that make these whole for calls and state dicts; `unsharded`.

Note [Loads that replace parameters]
    PyTorch loads a parameter by a copy into it, by putting the tensor of the state dict in its place
    (``assign=True``), or by a swap of both. After the last two neither the optimizer nor the unit would see
    what was loaded. So for that time a module finds stand-ins, and what has replaced one is copied. They have
    the memory of the whole parameters; or, where owners keep another dtype, values in that dtype.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import raise_together
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.unit import Unit
from zero_optim.shard.registration import is_registered


class _Walk:
    """The values of a unit while modules save or load their state. Communicates."""

    def __init__(self, units: UnitsInUse, unit: Unit) -> None:
        self.unit = unit
        self._units = units
        self._visits: list[_Visit] = []  # the outermost first
        self._end = ExitStack()

    def enter(self, visit: "_Visit") -> Mapping[Tensor, Tensor]:
        """Gather the values, unless they are there, and return them; all ranks call."""
        if not self._visits:
            request = self._units.on_request([self.unit], as_kept=True, tells=False)
            self._request = self._end.enter_context(request)
            self._units.unfinished.append(self.break_off)
        self._visits.append(visit)
        return self._request.values

    def leave(self, *, written: bool = False) -> None:
        """Release the values when the outermost visit ends; owners keep written ones."""
        self._visits.pop()
        if written:
            self._request.mark(written=True)
        if not self._visits:
            self._units.unfinished.remove(self.break_off)
            self._end.close()

    def break_off(self) -> None:
        """End a walk over modules that an exception broke off: loaded values are dropped."""
        self._request.mark(written=False)
        while self._visits:
            self._visits[-1].restore(written=False)
            self.leave()


@dataclass(slots=True, eq=False)
class _Visit:
    """The hooks of one module, which finds stand-ins in the place of its parameters of a unit."""

    walk: _Walk
    own: dict[str, Any] | None = None  # the module's parameters, while it finds stand-ins
    hidden: tuple[tuple[str, Tensor, Tensor], ...] = ()  # name, parameter, memory of its stand-in

    def begin(self, module: nn.Module, *_: object) -> None:
        if self.own is not None:  # an exception has ended the walk that began it
            self.walk.break_off()
        if any(bucket.is_left for bucket in self.walk.unit.buckets):
            return
        values, own = self.walk.enter(self), cast("Any", module._parameters)
        self.hidden = tuple((name, p, values[p].detach()) for name, p in own.items() if p in values)
        self.own = own
        for name, param, place in self.hidden:
            own[name] = nn.Parameter(place, requires_grad=param.requires_grad)

    @torch.no_grad()
    def restore(self, *, written: bool) -> None:
        """Put the module's own parameters back; loaded values are in their places then."""
        (own, self.own), (hidden, self.hidden) = (self.own, None), (self.hidden, ())
        assert own is not None  # the visit has begun
        for name, param, place in hidden:
            loaded, own[name] = own[name], param
            if written and loaded is not None and loaded.data_ptr() != place.data_ptr():
                place.copy_(loaded)

    def after_state_dict(self, _: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        if self.own is None:
            return
        for name, _param, place in self.hidden:
            entry = state.get(prefix + name)
            if isinstance(entry, Tensor) and entry.data_ptr() == place.data_ptr():
                state[prefix + name] = entry.detach().clone()
        self.restore(written=False)
        self.walk.leave()

    def after_load(self, _: nn.Module, __: object) -> None:
        if self.own is not None:
            self.restore(written=True)
            self.walk.leave(written=True)


def hook_up(choice: UnitChoice, units: UnitsInUse) -> None:
    """Register the hooks of all modules that are units, or have parameters in one."""
    in_units = {param for unit in units.units for param in unit.params}
    number_of = {module: number for number, module in enumerate(choice.modules)}
    walks = [_Walk(units, unit) for unit in units.units]
    for module in units.model.modules():
        used = {choice.unit_of[param] for param in module.parameters(recurse=False) if param in in_units}
        numbers = {number_of[module]} if module in number_of else used & {0}
        for number in numbers:  # one at most
            units.unit_of[module] = units.units[number]
            units.watch(module, ends=True)
        for number in sorted(used | numbers):
            visit, untyped = _Visit(walks[number]), cast("Any", module)
            untyped.register_state_dict_pre_hook(visit.begin)
            # PyTorch sets an attribute on this one, which a bound method does not bear.
            untyped.register_state_dict_post_hook(partial(visit.after_state_dict))
            untyped.register_load_state_dict_pre_hook(visit.begin)
            untyped.register_load_state_dict_post_hook(visit.after_load)


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Return the units of a model, or of one that a module is in; None if there are none."""
    return next(filter(None, map(UnitsInUse.on, model.modules())), None)


def units_at(module: nn.Module) -> UnitsInUse | None:
    """Return the units of a module that was itself wrapped or sharded in place, or None."""
    units = UnitsInUse.on(module)
    return units if units is not None and units.model is module else None


def units_in(module: object, hint: str) -> UnitsInUse:
    """Return the units of a module of a fully sharded model; TypeError or ValueError if none. All call."""
    if not isinstance(module, nn.Module):
        name = type(module).__name__
        raise_together(TypeError(f"expected a fully sharded model, or a module of one, got {name}"))
    units = units_of(module)
    if units is None:
        if any(map(is_registered, module.parameters())):
            hint = (
                "this {name} lies inside a unit of a fully sharded model, which is made whole as one: give "
                "the module that is the unit, or one around it"
            )
        raise_together(ValueError(hint.format(name=type(module).__name__)))  # the others wait
    return units


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
    units = units_in(module, hint)
    params = set[Tensor](module.parameters())
    chosen = [unit for unit in units.units if not params.isdisjoint(unit.params)]
    with units.on_request(chosen, as_kept=False) as request, units.pinned(chosen):
        request.mark(written=writes)
        yield
