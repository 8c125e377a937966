"""State dicts and loads of units whose owners keep another dtype than the model computes in.

Modules find other parameters in the place of their own while their part of a state dict is made, or loaded:
the values as owners keep them, gathered for that. So what is saved has not been rounded, and owners keep what
was loaded, bit for bit. The model's own parameters stay freed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero_optim.ddp.full.stand_ins import StandIns
from zero_optim.ddp.full.unit import Unit
from zero_optim.ddp.full.units import UnitsInUse
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
        self._visits: list[Callable[[], None]] = []

    def enter(self, broke_off: Callable[[], None]) -> None:
        """Gather the values, unless they are there.

        Args:
            broke_off: called if an exception has ended the walk over the modules, before `leave`.

        Raises:
            RuntimeError: parameters of the model are whole for somebody to read or write. Those of any unit,
                so that a walk over all of them raises before it has changed anything.
        """
        if not self._depth:
            self._units.supply.check_unpinned()
            buckets = [WideBucket(bucket) for bucket in self.unit.buckets]
            for pending in [self._units.supply.start_gather_of(bucket) for bucket in buckets]:
                pending.wait()
            self._buckets = buckets
            self._values = {param: value for bucket in buckets for param, value in bucket.values.items()}
            self._units.unfinished.append(self.break_off)
        self._depth += 1
        self._visits.append(broke_off)

    def leave(self, *, written: bool = False) -> None:
        """Let go of the values when the outermost user leaves; owners keep what was written to them."""
        self._depth -= 1
        self._is_written |= written
        if self._depth:
            return
        buckets, is_written = self._buckets, self._is_written
        self._forget()
        for bucket in buckets if is_written else ():
            bucket.take_over()

    def _forget(self) -> None:
        self._depth = 0
        self._buckets, self._values, self._is_written = [], {}, False
        self._visits.clear()
        self._units.unfinished.remove(self.break_off)

    def break_off(self) -> None:
        """Let go of the values when an exception has ended the walk that began with them; all ranks call."""
        if self._depth:
            for broke_off in self._visits:
                broke_off()
            self._forget()

    @contextmanager
    def values(self) -> Iterator[dict[Tensor, nn.Parameter]]:
        """Give the values for the time of a ``with``; all ranks enter and leave it."""
        self.enter(_nothing)
        try:
            yield self._values
        finally:
            self.leave()

    def stand_in(self, module: nn.Module) -> StandIns:
        """Have a module find the values in the place of its own parameters, until it is ended."""
        return StandIns(module, self._values)


def wide_units(units: UnitsInUse) -> dict[int, WideUnit]:
    """Make one for each unit of which owners keep another dtype, by number."""
    wide = [unit for unit in units.units if unit.is_rounded]
    return {unit.number: WideUnit(units, unit) for unit in wide}


@dataclass(slots=True, eq=False)
class _Visit:
    """What the hooks of one module do.

    Args:
        wide: the unit that has parameters of the module, or is it.

    Attributes:
        stand_ins: what the module finds in the place of its own parameters, while it does.
    """

    wide: WideUnit
    stand_ins: StandIns | None = None

    def begin(self, module: nn.Module) -> None:
        """Have the module find the values, unless state dicts are to show it as it is."""
        if self.stand_ins is not None:  # an exception has ended the walk that began it
            self.wide.break_off()
        if not self.wide.unit.is_left:
            self.wide.enter(self.break_off)
            self.stand_ins = self.wide.stand_in(module)

    def copy(self, state: dict[str, Any], prefix: str) -> None:
        """Copy the values in a state dict, which outlive the gathered ones."""
        for name, value in ({} if self.stand_ins is None else self.stand_ins.places).items():
            found = state.get(prefix + name)
            if isinstance(found, Tensor) and found.data_ptr() == value.data_ptr():
                state[prefix + name] = found.detach().clone()

    def end(self, *, written: bool) -> None:
        """Have the module find its own parameters again."""
        if self.stand_ins is not None:
            stand_ins, self.stand_ins = self.stand_ins, None
            stand_ins.end(written=written)
            self.wide.leave(written=written)

    def break_off(self) -> None:
        """Do so when an exception has ended the walk: what was loaded is dropped."""
        if self.stand_ins is not None:
            stand_ins, self.stand_ins = self.stand_ins, None
            stand_ins.end(written=False)


def hook_wide_state(module: nn.Module, wide: WideUnit) -> None:
    """Register the hooks of a module that has parameters of a unit, or is one."""
    visit = _Visit(wide)

    def before(module: nn.Module, *_: object) -> None:
        visit.begin(module)

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        visit.copy(state, prefix)
        visit.end(written=False)

    def after_load(module: nn.Module, _: object) -> None:
        visit.end(written=True)

    untyped: Any = module
    untyped.register_state_dict_pre_hook(before)
    untyped.register_state_dict_post_hook(after_state_dict)
    untyped.register_load_state_dict_pre_hook(before)
    untyped.register_load_state_dict_post_hook(after_load)


def _nothing() -> None:
    """Do nothing: nobody stands in for a module's parameters."""
