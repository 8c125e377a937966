"""Modules that save or load their state find whole values in the place of their parameters of units.

Note [Loads that replace parameters]
    PyTorch loads a parameter by a copy into it, by putting the tensor of the state dict in its place
    (``assign=True``), or by a swap of both. After the last two neither the optimizer nor the unit would see
    what was loaded. So for that time a module finds stand-ins, and what has replaced one is copied. They have
    the memory of the whole parameters; or, where owners keep another dtype, values in that dtype.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_optim.ddp.full.unit import Unit, UnitValues


@dataclass(slots=True, eq=False)
class _Visit:
    """A module that finds stand-ins, from a hook before it saves or loads to the one behind."""

    module: nn.Module
    requests: dict[Unit, UnitValues]  # of this visit and of those around it
    end: ExitStack = field(default_factory=ExitStack)  # releases the values that this visit has asked for
    hidden: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # with memory of the stand-in

    def hide(self) -> None:
        """Put stand-ins in the places of parameters whose values are asked for."""
        own = cast("Any", self.module._parameters)
        for name, param in own.items():
            for values in [each.values for each in self.requests.values() if param in each.values]:
                self.hidden.append((name, param, values[param].detach()))
        for name, param, place in self.hidden:
            own[name] = nn.Parameter(place, requires_grad=param.requires_grad)

    @torch.no_grad()
    def restore(self, *, written: bool) -> None:
        """Put the module's own parameters back; have owners keep what was loaded, or not."""
        for request in self.requests.values():
            request.mark(written=written)
        own = cast("Any", self.module._parameters)
        for name, param, place in self.hidden:
            loaded, own[name] = own[name], param
            if written and loaded is not None and loaded.data_ptr() != place.data_ptr():
                place.copy_(loaded)


class StateVisits:
    """The visits of a model's modules that are under way. They communicate: all ranks make them alike."""

    def __init__(self, request: Callable[[Unit], AbstractContextManager[UnitValues]]) -> None:
        self._request = request
        self._under_way: list[_Visit] = []  # the outermost first

    def watch(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Register the hooks of a module with parameters of some units."""
        untyped, begin = cast("Any", module), partial(self._begin, units)
        untyped.register_state_dict_pre_hook(begin)
        # PyTorch sets an attribute on this one, which a bound method does not bear.
        untyped.register_state_dict_post_hook(partial(self._after_state_dict))
        untyped.register_load_state_dict_pre_hook(begin)
        untyped.register_load_state_dict_post_hook(self._after_load)

    def break_off(self) -> None:
        """End visits that an exception broke off: loaded values are dropped."""
        while self._under_way:
            self._end(self._under_way[-1], written=False)

    def _begin(self, units: Sequence[Unit], module: nn.Module, *_: object) -> None:
        if any(visit.module is module for visit in self._under_way):  # an exception has ended that one
            self.break_off()
        if any(bucket.values.is_left for unit in units for bucket in unit.buckets):
            return
        visit = _Visit(module, dict(self._under_way[-1].requests) if self._under_way else {})
        self._under_way.append(visit)
        for unit in units:
            if unit not in visit.requests:
                visit.requests[unit] = visit.end.enter_context(self._request(unit))
        visit.hide()

    def _ended(self, module: nn.Module) -> _Visit | None:
        visit = self._under_way[-1] if self._under_way else None
        return visit if visit is not None and visit.module is module else None

    def _end(self, visit: _Visit, *, written: bool) -> None:
        visit.restore(written=written)
        self._under_way.pop()
        visit.end.close()

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        visit = self._ended(module)
        if visit is None:
            return
        for name, _param, place in visit.hidden:
            entry = state.get(prefix + name)
            if isinstance(entry, Tensor) and entry.data_ptr() == place.data_ptr():
                state[prefix + name] = entry.detach().clone()
        self._end(visit, written=False)

    def _after_load(self, module: nn.Module, _: object) -> None:
        visit = self._ended(module)
        if visit is not None:
            self._end(visit, written=True)
