"""Units in a backward pass: whole before it comes to them, freed behind it, gradients launched between.

Note [Places of launches]
    All ranks must start collectives in one order. Where ranks may use different parameters, a bucket is full
    at different places. So with ``find_unused_parameters`` or a static graph full buckets are held, and
    launched behind the gather of a unit whose output the backward pass reaches: by then all gradients of
    units that were called only later have come. When each unit has been gathered, buckets are launched as
    soon as they are full, those of parameters in no unit last.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from zero_optim.ddp.full.unit import Unit, UnitOperations, UnitOrder, UnitUse
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.inbox import weakly, when_backward_ends
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.unit_stamps import Purpose


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


class UnitsInBackward:
    """Gathers and frees units in backward passes, as Note [When a unit is whole] in `in_use` says."""

    def __init__(self, operations: UnitOperations) -> None:
        self._operations = operations
        self.order = UnitOrder()
        self._waiting: dict[int, list[Unit]] = {}  # by the index of a parameter
        for unit in operations.units:
            for index in unit.waits_for:
                self._waiting.setdefault(index, []).append(unit)
        # Autograd's hooks hold these, and numbers of units: no model.
        self.reached, self.input_came = weakly(self._output_reached), weakly(self._input_reached)

    def use(self, reducer: OwnerReducer) -> None:
        """Launch the buckets of this reducer from now on."""
        self.launches: LaunchOrder | None = None  # needed where ranks may use different parameters
        if reducer.options.may_be_unused:
            self.launches = LaunchOrder(self._operations.units, reducer.assignment.buckets)

    def _output_reached(
        self, number: int, place: int | None = None, use: UnitUse | None = None, _: Tensor | None = None
    ) -> None:
        """Make a unit whole when its output has a gradient; RuntimeError with create_graph."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not possible with FullyShardedDataParallel: the gradients of gradients "
                "would read parameters that are freed by then. Use ShardedDataParallel"
            )
        unit = self._operations.units[number]
        self.need(unit, place)
        if use is not None:
            unit.reach(use)

    def _input_reached(self, number: int, use: UnitUse) -> None:
        unit = self._operations.units[number]
        if unit.take_input(use):
            self._operations.free_unused([unit])

    def begin(self, current: BackwardPass) -> None:
        """Note that a backward pass begins or began, of which full buckets may wait for launches here."""
        if self.launches is not None:
            self.launches.begin(current)

    def need(self, unit: Unit, place: int | None = None) -> None:
        """Make a unit whole, and fetch the next."""
        if not self.order.is_under_way:
            end = partial(weakly(self.end), self.order.begin())
            if self.launches is not None:
                self.launches.begin()
            when_backward_ends(end, partial(end, broke_off=True))
        self._operations.at(Moment.BEFORE_BACKWARD, unit.buckets, Purpose.BACKWARD)
        if self.launches is not None:
            self.launches.reached(unit.number, place)
        following = self.order.reached(unit)
        if following is not None:
            buckets, gather = following.buckets, Operation.GATHER
            self._operations.at(Moment.BEFORE_BACKWARD, buckets, Purpose.BACKWARD, only=gather)
            if self.launches is not None:
                self.launches.gathered(following.number)

    def gradient_came(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        for unit in self._waiting.get(index, ()):
            if unit.take_gradient(index):
                self._operations.free_unused([unit])

    def end(self, order: list[Unit], *, broke_off: bool = False) -> None:
        """End a backward pass with this order, if it has not ended; after an exception wait for nothing."""
        if order is not self.order.now or not self.order.is_under_way:
            return
        self.order.end(broke_off=broke_off)
        if self.launches is not None:
            self.launches.end()
        for unit in self._operations.units:
            unit.end_pass()
        if not broke_off:
            self._operations.free_unused(self._operations.units, Moment.AFTER_BACKWARD)
