"""Units in a backward pass: whole before it comes to them, freed behind it, gradients launched between."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zero_optim.ddp.full.launch_order import LaunchOrder
from zero_optim.ddp.full.unit import Unit, UnitOperations, UnitOrder, UnitUse
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.graph import on_gradient
from zero_optim.ddp.reducer.inbox import weakly, when_backward_ends
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.unit_stamps import Purpose


class UnitsInBackward:
    """Gathers and frees units in backward passes, as Note [When a unit is whole] in `in_use` says."""

    def __init__(self, operations: UnitOperations) -> None:
        self._operations = operations
        self._order = UnitOrder()
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

    @property
    def is_under_way(self) -> bool:
        """Whether a backward pass has come to a unit, and has not ended."""
        return self._order.is_under_way

    # ------------------------------------------------------------------ in a forward pass

    def expect(self, unit: Unit, tensors: Sequence[Tensor], place: int) -> None:
        """Make a unit whole when the gradient of an output is there, of the call that ends at a place."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                on_gradient(tensor, partial(self.reached, unit.number, place, unit.use))

    # ------------------------------------------------------------------ in a backward pass

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
        if not self._order.is_under_way:
            end = partial(weakly(self._end), self._order.begin())
            if self.launches is not None:
                self.launches.begin()
            when_backward_ends(end, partial(end, broke_off=True))
        self._operations.at(Moment.BEFORE_BACKWARD, unit.buckets, Purpose.BACKWARD)
        if self.launches is not None:
            self.launches.reached(unit.number, place)
        following = self._order.reached(unit)
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

    def break_off(self) -> None:
        """End a pass that an exception has ended."""
        self._end(self._order.now, broke_off=True)

    def _end(self, order: list[Unit], *, broke_off: bool = False) -> None:
        """End a backward pass with this order, if it has not ended; after an exception wait for nothing."""
        if order is not self._order.now or not self._order.is_under_way:
            return
        self._order.end(broke_off=broke_off)
        if self.launches is not None:
            self.launches.end()
        for unit in self._operations.units:
            unit.end_pass()
        if not broke_off:
            self._operations.free_unused(self._operations.units, Moment.AFTER_BACKWARD)
