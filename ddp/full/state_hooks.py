"""Hooks on modules by which state dicts show the values of units, and loads reach their owners.

Note [Loads that replace parameters]
    PyTorch loads a parameter by a copy into it, by putting the tensor of the state dict in its place
    (``assign=True``), or by a swap of both. After the last two neither the optimizer nor the unit would see
    what was loaded. So for that time a module finds stand-ins, and what has replaced one is copied. They have
    the memory of the whole parameters; or, where owners keep another dtype, values in that dtype.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.unit import Unit


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


def hook_states(units: UnitsInUse, hooked: Iterable[tuple[nn.Module, int]]) -> None:
    """Register the hooks of modules, each with the number of a unit that it is, or has parameters of."""
    walks = [_Walk(units, unit) for unit in units.units]
    for module, number in hooked:
        visit, untyped = _Visit(walks[number]), cast("Any", module)
        untyped.register_state_dict_pre_hook(visit.begin)
        # PyTorch sets an attribute on this one, which a bound method does not bear.
        untyped.register_state_dict_post_hook(partial(visit.after_state_dict))
        untyped.register_load_state_dict_pre_hook(visit.begin)
        untyped.register_load_state_dict_post_hook(visit.after_load)
