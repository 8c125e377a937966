"""Hooks on modules by which state dicts show the values of units, and loads reach their owners.

Note [Loads that replace parameters]
    PyTorch loads a parameter by a copy into it, by putting the tensor of the state dict in its place
    (``assign=True``), or by a swap of both. After the last two neither the optimizer nor the unit would see
    what was loaded. So for that time a module finds stand-ins, and what has replaced one is copied. They have
    the memory of the whole parameters; or, where owners keep another dtype, values in that dtype.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.unit import Unit

if TYPE_CHECKING:
    from zero_optim.shard.row_bucket import WideBucket


class UnitValues:
    """The values of a unit while modules save or load their state. Communicates."""

    def __init__(self, units: UnitsInUse, unit: Unit) -> None:
        self.unit = unit
        self.values: Mapping[Tensor, Tensor] = {}
        self._units = units
        self._wide: list[WideBucket] = []  # where owners keep another dtype
        self._visits: list[_Visit] = []  # the outermost first
        self._is_written = False

    def enter(self, visit: "_Visit") -> None:
        """Gather the values, unless they are there; all ranks call."""
        if not self._visits:
            if self.unit.is_rounded:
                self._wide = self._units.gather_as_kept(self.unit)
                self.values = {param: value for each in self._wide for param, value in each.values.items()}
            else:
                self._units.hold(self.unit)
                self.values = {param: param for param in self.unit.params}
            self._units.unfinished.append(self.break_off)
        self._visits.append(visit)

    def leave(self, *, written: bool = False) -> None:
        """Let go of the values when the outermost visit ends; owners keep written ones."""
        self._visits.pop()
        self._is_written |= written
        if not self._visits:
            self._end(written=self._is_written)

    def _end(self, *, written: bool) -> None:
        wide, self._wide, self.values, self._is_written = self._wide, [], {}, False
        self._units.unfinished.remove(self.break_off)
        if self.unit.is_rounded:
            for bucket in wide if written else ():
                bucket.take_over()
            return
        try:
            if written:
                self.unit.take_written()
        finally:
            self._units.release(self.unit)

    def break_off(self) -> None:
        """End a walk over modules that an exception broke off: loaded values are dropped."""
        if self._visits:
            for visit in self._visits:
                visit.restore(written=False)
            self._visits.clear()
            self._end(written=False)


@dataclass(slots=True, eq=False)
class _Visit:
    """The hooks of one module, which finds stand-ins in the place of its parameters of a unit."""

    values: UnitValues
    own: dict[str, Any] | None = None  # the module's parameters, while it finds stand-ins
    hidden: tuple[tuple[str, Tensor, Tensor], ...] = ()  # name, parameter, memory of its stand-in

    def begin(self, module: nn.Module, *_: object) -> None:
        if self.own is not None:  # an exception has ended the walk that began it
            self.values.break_off()
        if any(bucket.is_left for bucket in self.values.unit.buckets):
            return
        self.values.enter(self)
        own: Any = module._parameters
        values = self.values.values
        self.hidden = tuple((name, p, values[p].detach()) for name, p in own.items() if p in values)
        self.own = own
        for name, param, place in self.hidden:
            own[name] = nn.Parameter(place, requires_grad=param.requires_grad)

    @torch.no_grad()
    def restore(self, *, written: bool) -> None:
        """Put the module's own parameters back; loaded values are in their places then."""
        own, self.own = self.own, None
        assert own is not None  # the visit has begun
        for name, param, place in self.hidden:
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
        self.values.leave()

    def after_load(self, _: nn.Module, __: object) -> None:
        if self.own is not None:
            self.restore(written=True)
            self.values.leave(written=True)


def hook_states(module: nn.Module, values: UnitValues) -> None:
    """Register the hooks of a module that has parameters of a unit, or is one."""
    visit = _Visit(values)
    untyped: Any = module
    untyped.register_state_dict_pre_hook(visit.begin)
    # PyTorch sets an attribute on this one, which a bound method does not bear.
    untyped.register_state_dict_post_hook(partial(visit.after_state_dict))
    untyped.register_load_state_dict_pre_hook(visit.begin)
    untyped.register_load_state_dict_post_hook(visit.after_load)


@contextmanager
def values_of(units: UnitsInUse, unit: Unit) -> Iterator[Mapping[Tensor, Tensor]]:
    """Yield the values of a unit as its owners keep them; all ranks call. Communicates."""
    if unit.is_rounded:
        wide = units.gather_as_kept(unit)
        yield {param: value for each in wide for param, value in each.values.items()}
    else:
        with units.whole([unit.number], writes=False):
            yield {param: param for param in unit.params}
