"""Where in a backward pass buckets of gradients are launched, between the gathers of units.

Note [Places of launches]
    All ranks must start collectives in one order. Where ranks may use different parameters, a bucket is full
    at different places. So with ``find_unused_parameters`` or a static graph full buckets are held, and
    launched behind the gather of a unit whose output the backward pass reaches: by then all gradients of
    units that were called only later have come. When each unit has been gathered, buckets are launched as
    soon as they are full, those of parameters in no unit last.
"""

import weakref
from collections.abc import Sequence
from math import inf

import torch

from zero_optim.ddp.full.unit import Unit
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.backward_pass import BackwardPass


class LaunchOrder:
    """Holds buckets back, and has them launched: Note [Places of launches]."""

    def __init__(self, units: Sequence[Unit], reducer: OwnerReducer) -> None:
        self._units = units
        unit_of = {param: unit.number for unit in units for param in unit.params}
        self._unit_of = [unit_of[bucket.params[0]] for bucket in reducer.assignment.buckets]
        self._reducer = weakref.ref(reducer)
        self._since = 0  # when, by the clock of calls, the first forward pass behind a backward pass began
        self._first: dict[int, int] = {}  # by unit, when it was first called since then
        self._trains = False
        self._freed: frozenset[int] = frozenset()  # units that were not whole when the backward pass began
        self._to_gather: set[int] | None = None  # those of them to be gathered, in a backward pass
        self._has_ended = False  # a backward pass, since the last forward pass

    def called(self, number: int, clock: int, *, is_outermost: bool) -> None:
        """Note that a unit's call begins in a forward pass."""
        if is_outermost:
            self._trains = torch.is_grad_enabled()  # reentrant checkpointing calls units without gradients
            self._to_gather = None  # no backward pass runs
        if not self._trains:
            return
        if self._has_ended:
            self._first.clear()
            self._since, self._has_ended = clock, False
        self._first.setdefault(number, clock)

    def _running(self) -> BackwardPass | None:
        reducer = self._reducer()
        return None if reducer is None else reducer.running

    def begin(self) -> bool:
        """Note that a backward pass begins or began; return whether to hold its buckets."""
        if self._to_gather is None:
            self._freed = frozenset(number for number in self._first if not self._units[number].is_whole)
            self._to_gather = set(self._freed)
        return bool(self._to_gather)

    def reached(self, number: int, place: int | None) -> None:
        """Note that a unit is whole, before the next is fetched, at the place of its call, or None."""
        self.gathered(number)
        if place is None or place <= self._since or number not in self._freed:
            return
        if (current := self._running()) is not None:
            current.launch_due(lambda bucket: self._called_first(bucket) > place)

    def _called_first(self, bucket: int) -> float:
        number = self._unit_of[bucket]
        return self._first.get(number, inf) if number else 0

    def gathered(self, number: int | None) -> None:
        """Note that the gather of a unit was started, or is not needed; None for no unit."""
        if self._to_gather is not None and number in self._to_gather:
            self._to_gather.remove(number)
            if not self._to_gather and (current := self._running()) is not None:
                current.release()

    def end(self) -> None:
        """Note that the backward pass is over."""
        self._to_gather, self._has_ended = None, True
