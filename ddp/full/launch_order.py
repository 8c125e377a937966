"""Where in a backward pass buckets of gradients are launched, between the gathers of units.

Note [Places of launches]
    All ranks must start collectives in one order. Where ranks may use different parameters, a bucket is full
    at different places. So with ``find_unused_parameters`` or a static graph full buckets are held, and
    launched behind the gather of a unit whose output the backward pass reaches: by then all gradients of
    units that were called only later have come. When each unit has been gathered, buckets are launched as
    soon as they are full, those of parameters in no unit last.
"""

from collections.abc import Iterable, Sequence
from math import inf

import torch

from zero_optim.ddp.full.unit import Unit
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket


class LaunchOrder:
    """Holds buckets back, and has them launched: Note [Places of launches]."""

    def __init__(self, units: Sequence[Unit], buckets: Iterable[ReducerBucket]) -> None:
        self._units = units
        unit_of = {param: unit.number for unit in units for param in unit.params}
        self._unit_of = [unit_of[bucket.params[0]] for bucket in buckets]
        self._current: BackwardPass | None = None  # the backward pass that runs
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
            self._current = self._to_gather = None  # no backward pass runs
        if not self._trains:
            return
        if self._has_ended:
            self._first.clear()
            self._since, self._has_ended = clock, False
        self._first.setdefault(number, clock)

    def begin(self, current: BackwardPass | None = None) -> None:
        """Note that a backward pass begins, or began; hold its buckets where units are to be gathered."""
        if self._to_gather is None:
            self._freed = frozenset(number for number in self._first if not self._units[number].is_whole)
            self._to_gather = set(self._freed)
        if current is not None:
            self._current = current
            if self._to_gather:
                current.hold()

    def reached(self, number: int, place: int | None) -> None:
        """Note that a unit is whole, before the next is fetched, at the place of its call, or None."""
        self.gathered(number)
        if self._current is None or place is None or place <= self._since or number not in self._freed:
            return
        first = [self._first.get(number, inf) if number else 0 for number in self._unit_of]
        self._current.launch_due(lambda bucket: first[bucket] > place)

    def gathered(self, number: int) -> None:
        """Note that the gather of a unit was started, or is not needed."""
        if self._to_gather is not None and number in self._to_gather:
            self._to_gather.remove(number)
            if not self._to_gather and self._current is not None:
                self._current.release()

    def end(self) -> None:
        """Note that the backward pass is over."""
        self._current, self._to_gather, self._has_ended = None, None, True
