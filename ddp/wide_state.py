"""State dicts and loads of units whose owners keep another dtype than the model computes in.

Modules find other parameters in the place of their own while their part of a state dict is made, or loaded:
the values as owners keep them, gathered for that. So what is saved has not been rounded, and owners keep what
was loaded, bit for bit. The model's own parameters stay freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero_optim.ddp.unit import Unit
from zero_optim.ddp.units import UnitsInUse
from zero_optim.shard.wide import WideBucket


class WideUnit:
    """The values of a unit as its owners keep them, while somebody needs them. All ranks call; communicates.

    Args:
        units: all of the model.
        unit: the one.
    """

    def __init__(self, units: UnitsInUse, unit: Unit) -> None:
        self.unit = unit
        self._units = units
        self._depth = 0
        self._is_written = False
        self._buckets: list[WideBucket] = []
        self._values: dict[Tensor, nn.Parameter] = {}

    def enter(self) -> None:
        """Gather the values, unless they are there.

        Raises:
            RuntimeError: the parameters are whole for somebody to read or write.
        """
        if not self._depth:
            buckets = [WideBucket(bucket) for bucket in self.unit.buckets]
            for pending in [self._units.start_gather_of(bucket) for bucket in buckets]:
                pending.wait()
            self._buckets = buckets
            self._values = {param: value for bucket in buckets for param, value in bucket.values.items()}
        self._depth += 1

    def leave(self, *, written: bool = False) -> None:
        """Let go of the values when the outermost user leaves; owners keep what was written to them."""
        self._depth -= 1
        self._is_written |= written
        if self._depth:
            return
        buckets, is_written = self._buckets, self._is_written
        self._buckets, self._values, self._is_written = [], {}, False
        for bucket in buckets if is_written else ():
            bucket.take_over()

    @contextmanager
    def values(self) -> Iterator[dict[Tensor, nn.Parameter]]:
        """Give the values for the time of a ``with``; all ranks enter and leave it."""
        self.enter()
        try:
            yield self._values
        finally:
            self.leave()

    def put(self, module: nn.Module) -> dict[str, Tensor]:
        """Have a module find the values in the place of its own parameters; gives these, by name."""
        own: dict[str, Any] = module._parameters
        hidden = {name: param for name, param in own.items() if param is not None and param in self._values}
        own.update({name: self._values[param] for name, param in hidden.items()})
        return hidden

    def take_back(self, module: nn.Module, hidden: dict[str, Tensor], *, written: bool) -> None:
        """Have a module find its own parameters again.

        Args:
            module: as given to `put`.
            hidden: what that returned.
            written: values were loaded; some ways of loading put others in their place.
        """
        own: dict[str, Any] = module._parameters
        for name, param in hidden.items():
            value = self._values[param]
            if written and own[name] is not value:
                value.data.copy_(own[name].detach())
            own[name] = param


def wide_units(units: UnitsInUse) -> dict[int, WideUnit]:
    """Make one for each unit of which owners keep another dtype, by number."""
    return {unit.number: WideUnit(units, unit) for unit in units.units if unit.is_rounded}


@dataclass(slots=True, eq=False)
class _Visit:
    """What the hooks of one module do.

    Args:
        wide: the unit that has parameters of the module, or is it.

    Attributes:
        hidden: by name, the module's own parameters while others are in their place.
    """

    wide: WideUnit
    hidden: dict[str, Tensor] | None = None

    def begin(self, module: nn.Module) -> None:
        """Have the module find the values, unless state dicts are to show it as it is."""
        if not self.wide.unit.is_left:
            self.wide.enter()
            self.hidden = self.wide.put(module)

    def copy(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Copy the values in a state dict, which outlive the gathered ones."""
        for name in self.hidden or ():
            found, value = state.get(prefix + name), module._parameters[name]
            if isinstance(found, Tensor) and value is not None and found.data_ptr() == value.data_ptr():
                state[prefix + name] = found.detach().clone()

    def end(self, module: nn.Module, *, written: bool) -> None:
        """Have the module find its own parameters again."""
        if self.hidden is not None:
            hidden, self.hidden = self.hidden, None
            self.wide.take_back(module, hidden, written=written)
            self.wide.leave(written=written)


def hook_wide_state(module: nn.Module, wide: WideUnit) -> None:
    """Register the hooks of a module that has parameters of a unit, or is one."""
    visit = _Visit(wide)

    def before(module: nn.Module, *_: object) -> None:
        visit.begin(module)

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        visit.copy(module, state, prefix)
        visit.end(module, written=False)

    def after_load(module: nn.Module, _: object) -> None:
        visit.end(module, written=True)

    untyped: Any = module
    untyped.register_state_dict_pre_hook(before)
    untyped.register_state_dict_post_hook(after_state_dict)
    untyped.register_load_state_dict_pre_hook(before)
    untyped.register_load_state_dict_post_hook(after_load)
