"""The units of a model at run time: gathered before they are used, freed after it, the next one on its way.

Note [When a unit is whole]
    A unit is gathered when one of its modules is called, and freed when the outermost call of them returns.
    The outermost unit of a training step stays, as the backward pass begins with it, and so do the last
    ``num_kept``. A step that changed a row frees its unit. In the backward pass a unit is gathered when the
    gradient of its output is there, and freed when all of its parameters have theirs; one with frozen ones
    also waits for the gradients of its module's inputs. Where a backward pass computes activations again,
    nothing is freed when a call returns. A unit whose module returns no tensor that `tensors_in` sees stays
    whole.

Note [The next unit]
    The pass before tells which unit is needed next: one pass for each outermost module that is called, and
    the last backward pass. The gather starts when the unit before is whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat.autograd import in_backward
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.ddp.full.guards import UnitMembers
from zero_optim.ddp.full.in_backward import UnitsInBackward
from zero_optim.ddp.full.saved_reads import SavedReads
from zero_optim.ddp.full.state_visits import StateVisits
from zero_optim.ddp.full.unit import Unit, UnitOperations, UnitOrder, UnitValues, buckets_of
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.graph import on_gradient, replaced, tensors_in
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.engine import Engine
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.module_calls import Call, ModuleCalls
from zero_optim.shard.rows.row_values import RowValues, Uncopied, WideValues, wide_bucket


class UnitsInUse(ModuleCalls, Uncopied):
    """Gathers and frees the units of a model. All ranks make the same calls, in one order; communicates."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        before: Callable[[Any, Any], Any],  # called with the arguments of a forward pass; may replace them
        after: Callable[[object], None],  # called with the output of one
        *,
        num_kept: int | None,  # how many stay whole until the backward pass, the last ones; None for all
        guards_reads: bool,
    ) -> None:
        super().__init__(model)
        self.units = units  # by number
        self._unit_of: dict[nn.Module, Unit] = {}  # of modules whose calls need one
        self._operations = UnitOperations(units, self.under_way, self._unit_of)
        self.keepalive: object = None  # the wrapper, if it wraps in place
        self._before, self._after = before, after
        self._num_kept = num_kept
        self._forward = defaultdict[Unit, UnitOrder](UnitOrder)  # by the one whose call is the outermost
        self.backward = UnitsInBackward(self._operations)
        self._reads = SavedReads(units, self.backward.reached, is_on=guards_reads)
        self._visits = StateVisits(lambda unit: self.on_request([unit], as_kept=True, tells=False))
        self._members = UnitMembers(self.model)

    def hook_up(self, choice: UnitChoice) -> None:
        """Watch the calls of modules that are units or have parameters of the outermost, and all state."""
        params = {param for unit in self.units for param in unit.params}
        for module in self.model.modules():
            called, numbers = choice.units_at(module, params)
            if called is not None:
                self._unit_of[module] = self.units[called]
                self.watch(module, ends=True)
            if numbers:
                self._visits.watch(module, [self.units[number] for number in numbers])

    def use(self, engine: Engine, gathers: UnitGathers, reducer: OwnerReducer) -> None:
        """Gather for this optimizer from now on, and launch its buckets; its ranks are the same as before."""
        self.gathers = gathers
        self._operations.use(engine, gathers)
        self.backward.use(reducer)

    def keep_alive(self, wrapper: object) -> None:
        """Hold the wrapper of a model that is sharded in place, which nobody else holds."""
        self.keepalive = wrapper

    @property
    def buckets(self) -> list[Bucket[RowValues]]:
        """Those of all units."""
        return buckets_of(self.units)

    def nbytes_live(self) -> int:
        """Bytes of the flat tensors that are there now, beside what this rank keeps for good."""
        return sum(bucket.values.nbytes_live for bucket in self.buckets)

    # ------------------------------------------------------------------ forward

    def begin_pass(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - the user's
        """Forget what an exception has ended without a hook, as a Ctrl-C does; then the wrapper begins."""
        self._visits.break_off()
        order = self.backward.order
        if order.is_under_way and not in_backward():  # a thread of the engine may not have let go
            self.backward.end(order.now, broke_off=True)
        if isinstance(self._reads.user, Call):
            self._reads.end(self._reads.user)
        return self._before(args, kwargs)

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Make a unit whole for a call."""
        unit, goes_back = self._unit_of[module], in_backward()
        is_outermost, is_used = len(self.under_way) == 1, self._operations.num_users(unit) > 1
        if unit.has_frozen and not is_used:
            unit.begin_use(tensors_in(inputs), self.backward.input_came)
        self._reads.begin(self.under_way[-1])
        if unit.is_whole and (is_used or goes_back):
            unit.arrive()  # perhaps it was gathered on another stream
        elif goes_back:  # activations are computed again
            self.backward.need(unit)
        else:
            self._enter(unit, is_outermost=is_outermost)
        if is_outermost and torch.is_grad_enabled() and not goes_back:
            self._members.check()

    def _enter(self, unit: Unit, *, is_outermost: bool) -> None:
        if is_outermost:
            self.gathers.stamps.begin_pass()
        purpose = Purpose.TRAINING if torch.is_grad_enabled() else Purpose.EVALUATION
        if self.backward.launches is not None:
            self.backward.launches.called(unit.number, self.clock, is_outermost=is_outermost)
        self._operations.at(Moment.BEFORE_FORWARD, unit.buckets, purpose, tells=True)
        order = self._forward[self._unit_of[self.under_way[0].module]]
        if is_outermost:
            order.begin()
        following = order.reached(unit)
        if following is not None:
            buckets, gather = following.buckets, Operation.GATHER
            self._operations.at(Moment.BEFORE_FORWARD, buckets, purpose, tells=True, only=gather)

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        """Free a unit, unless it is used on. Copies a returned view of a parameter, which would die."""
        unit, still = self._unit_of[call.module], False
        self._reads.end(call)
        if not self._operations.num_users(unit):
            tensors = tensors_in(output)
            if any(map(unit.shares_memory, tensors)):
                output = replaced(output, lambda each: each.clone() if unit.shares_memory(each) else each)
                tensors = tensors_in(output)
                still = any(map(unit.shares_memory, tensors))
            if not in_backward():  # else activations are computed again
                self._leave(call, None if raised or output is None else tensors)
        if still and not raised:
            raise RuntimeError(
                f"{unit.name} returned a view of a parameter in a {type(output).__name__}, where no copy can "
                "take its place: return a clone of it, as the parameter's memory goes when the call is over"
            )
        if call.is_pass and not raised:
            self._after(output)
        return output

    def _leave(self, call: Call, tensors: list[Tensor] | None) -> None:
        """Free a unit, unless it stays until the backward pass; ``tensors`` is None if the call raised."""
        unit, outermost, stays = self._unit_of[call.module], (self.under_way or [call])[0], False
        order = self._forward[self._unit_of[outermost.module]]
        if torch.is_grad_enabled() and tensors is not None:
            reached = partial(self.backward.reached, unit.number, self.clock, unit.use)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    on_gradient(tensor, reached)
            stays = not self.under_way or not tensors or self._num_kept is None
            if not stays and self._num_kept:
                stays = unit in list(dict.fromkeys(reversed(order.before)))[: self._num_kept]
        if not stays:
            self._operations.at(Moment.AFTER_FORWARD, unit.buckets)
        if not self.under_way:
            order.end()
            unneeded = [bucket for bucket in self.buckets if bucket.values.comes]  # though they were fetched
            self._operations.at(Moment.AFTER_FORWARD, unneeded)

    # ------------------------------------------------------------------ on request

    def check_unpinned(self) -> None:
        """Raise RuntimeError if parameters of any unit are needed whole, or were given other memory."""
        for bucket in self.buckets:
            bucket.values.refresh()

    @contextmanager
    def on_request(self, units: Sequence[Unit], *, as_kept: bool, tells: bool = True) -> Iterator[UnitValues]:
        """Yield whole values of units, ``as_kept`` in the owners' dtype; if it ``tells``, errors raise."""
        held, wide, tells = list(units), list[Bucket[WideValues]](), tells and not self.under_way
        if as_kept and any(bucket.values.row.is_rounded for bucket in buckets_of(units)):
            self.check_unpinned()  # of all, so that a walk over modules raises before it has changed anything
            held, wide = [], [wide_bucket(bucket) for bucket in buckets_of(units)]
            self._operations.at(Moment.BEFORE_FORWARD, wide, Purpose.AS_KEPT)
        elif tells:
            self.gathers.stamps.begin_pass()
        request = UnitValues({param: param for unit in held for param in unit.params})
        request.values.update(pair for each in wide for pair in each.values.by_param.items())
        self._operations.requested.extend(held)
        try:
            self._operations.at(Moment.BEFORE_FORWARD, buckets_of(held), Purpose.REQUEST, tells=tells)
            yield request
        finally:
            request.values.clear()
            for unit in held:
                self._operations.requested.remove(unit)
            try:
                for bucket in wide or buckets_of(held) if request.are_written else ():
                    bucket.values.take_written()
            finally:
                if not (self.backward.order.is_under_way and in_backward()):  # which may need them
                    self._operations.free_unused(held)

    @contextmanager
    def pinned(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let nobody step, load or save units that are whole, inside a ``with``."""
        for bucket in buckets_of(units):
            bucket.values.pin()
        self._reads.begin(units)
        try:
            yield
        finally:
            self._reads.end(units)
            for bucket in buckets_of(units):
                bucket.values.unpin()
            self._members.accept_names({param for unit in units for param in unit.params})


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Return the units of a model, or of one that a module is in; None if there are none."""
    return next(filter(None, map(UnitsInUse.on, model.modules())), None)


def units_at(module: nn.Module) -> UnitsInUse | None:
    """Return the units of a module that was itself wrapped or sharded in place, or None."""
    units = UnitsInUse.on(module)
    return units if units is not None and units.model is module else None
