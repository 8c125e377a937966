"""The units of a model at run time: gathered before they are used, freed after it, the next one on its way.

Note [When a unit is whole]
    A unit is gathered when one of its modules is called, and freed when the outermost call of them returns.
    The outermost unit of a training step stays, as the backward pass begins with it. In the backward pass a
    unit is gathered when the gradient of its output is there, and freed when all of its parameters have
    theirs; one with frozen ones also waits for the gradients of its module's inputs. Where a backward pass
    computes activations again, nothing is freed when a call returns. A unit whose module returns no tensor
    that `tensors_in` sees stays whole.

Note [The next unit]
    The pass before tells which unit is needed next: one pass for each outermost module that is called, and
    the last backward pass. The gather starts when the unit before is whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_optim.compat.autograd import in_backward
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.ddp.full.guards import UnitMembers
from zero_optim.ddp.full.launch_order import LaunchOrder
from zero_optim.ddp.full.saved_reads import SavedReads
from zero_optim.ddp.full.state_visits import StateVisits
from zero_optim.ddp.full.unit import Unit, UnitOrder, UnitTask, UnitUse, UnitValues
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.graph import on_gradient, replaced, tensors_in
from zero_optim.ddp.reducer.inbox import weakly, when_backward_ends
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.engine import Engine
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.module_calls import Call, ModuleCalls
from zero_optim.shard.row_bucket import RowBucket, Uncopied
from zero_optim.shard.wide_bucket import WideBucket

if TYPE_CHECKING:
    from zero_optim.ddp.fully_sharded import FullyShardedDataParallel


class UnitsInUse(ModuleCalls, Uncopied):
    """Gathers and frees the units of a model. All ranks make the same calls, in one order; communicates."""

    def __init__(
        self,
        wrapper: "FullyShardedDataParallel",
        units: Sequence[Unit],
        *,
        num_kept: int | None,  # how many stay whole until the backward pass, the last ones; None for all
        guards_reads: bool,
    ) -> None:
        super().__init__(wrapper.module)
        self.units = units  # by number
        self._unit_of: dict[nn.Module, Unit] = {}  # of modules whose calls need one
        self.keepalive: FullyShardedDataParallel | None = None  # the wrapper, if it wraps in place
        self._before, self._after = weakly(wrapper.before_forward), weakly(wrapper.after_forward)
        self._num_kept = num_kept
        self._forward = defaultdict[Unit, UnitOrder](UnitOrder)  # by the one whose call is the outermost
        self._backward = UnitOrder()
        self._waiting: dict[int, list[Unit]] = {}  # by the index of a parameter
        for unit in units:
            for index in unit.waits_for:
                self._waiting.setdefault(index, []).append(unit)
        self._reached = weakly(self._output_reached)
        self._reads = SavedReads(units, self._reached, is_on=guards_reads)
        self._visits = StateVisits(lambda unit: self.on_request([unit], as_kept=True, tells=False))
        self._requested: list[Unit] = []  # that somebody needs whole, once for each request
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
        self._engine, self.gathers = engine, gathers
        self._places = LaunchOrder(self.units, reducer.assignment.buckets)

    def keep_alive(self, wrapper: "FullyShardedDataParallel") -> None:
        """Hold the wrapper of a model that is sharded in place, which nobody else holds."""
        self.keepalive = wrapper

    @property
    def buckets(self) -> list[RowBucket]:
        """Those of all units."""
        return _buckets_of(self.units)

    def nbytes_live(self) -> int:
        """Bytes of the flat tensors that are there now, beside what this rank keeps for good."""
        return sum(bucket.nbytes_live for bucket in self.buckets)

    # ------------------------------------------------------------------ operations

    def _at(
        self,
        moment: Moment,
        buckets: Sequence[Any],
        purpose: Purpose = Purpose.TRAINING,  # of gathers
        *,
        tells: bool = False,
        only: Operation | None = None,
    ) -> None:
        if buckets:
            task = UnitTask(self.units, self.gathers, purpose, tells=tells)
            self._engine.on(moment, buckets, task, only)

    def _free_unused(self, units: Iterable[Unit], moment: Moment = Moment.AFTER_MODULE) -> None:
        unused = [bucket for unit in units if not self._num_users(unit) for bucket in unit.buckets]
        self._at(moment, unused)

    # ------------------------------------------------------------------ forward

    def _num_users(self, unit: Unit) -> int:
        in_calls = [self._unit_of[call.module] for call in self.under_way]
        return self._requested.count(unit) + in_calls.count(unit)

    def begin_pass(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - the user's
        """Forget what an exception has ended without a hook, as a Ctrl-C does; then the wrapper begins."""
        self._visits.break_off()
        if not in_backward():  # a thread of the engine may not have let go of it yet
            self._end_backward(self._backward.now, broke_off=True)
        if isinstance(self._reads.user, Call):
            self._reads.end(self._reads.user)
        return self._before(args, kwargs)

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Make a unit whole for a call."""
        unit, goes_back = self._unit_of[module], in_backward()
        is_outermost, is_used = len(self.under_way) == 1, self._num_users(unit) > 1
        if unit.has_frozen and not is_used:
            unit.begin_use(tensors_in(inputs), weakly(self._input_reached))
        self._reads.begin(self.under_way[-1])
        if unit.is_whole and (is_used or goes_back):
            unit.arrive()  # perhaps it was gathered on another stream
        elif goes_back:  # activations are computed again
            self._need_in_backward(unit.number)
        else:
            self._enter(unit, is_outermost=is_outermost)
        if is_outermost and torch.is_grad_enabled() and not goes_back:
            self._members.check()

    def _enter(self, unit: Unit, *, is_outermost: bool) -> None:
        if is_outermost:
            self.gathers.stamps.begin_pass()
        purpose = Purpose.TRAINING if torch.is_grad_enabled() else Purpose.EVALUATION
        self._places.called(unit.number, self.clock, is_outermost=is_outermost)
        self._at(Moment.BEFORE_FORWARD, unit.buckets, purpose, tells=True)
        order = self._forward[self._unit_of[self.under_way[0].module]]
        if is_outermost:
            order.begin()
        following = _buckets_of(map(self.units.__getitem__, order.reached(unit.number)))
        self._at(Moment.BEFORE_FORWARD, following, purpose, tells=True, only=Operation.GATHER)

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        """Free a unit, unless it is used on. Copies a returned view of a parameter, which would die."""
        unit, still = self._unit_of[call.module], False
        self._reads.end(call)
        if not self._num_users(unit):
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
        unit, outermost, stays = self._unit_of[call.module], (self.under_way or [call])[0], False
        order = self._forward[self._unit_of[outermost.module]]
        if torch.is_grad_enabled() and tensors is not None:
            stays = self._watch(unit, tensors, order)
        if not stays:
            self._at(Moment.AFTER_FORWARD, unit.buckets)
        if not self.under_way:
            order.end()
            for each in self.units:
                if any(bucket.comes for bucket in each.buckets):  # fetched, and not needed
                    self._at(Moment.AFTER_FORWARD, each.buckets)

    def _watch(self, unit: Unit, tensors: list[Tensor], order: UnitOrder) -> bool:
        """Make a unit whole before the backward pass comes to it; return whether it stays until then."""
        reached, place, use = self._reached, self.clock, unit.use
        for tensor in tensors:
            if tensor.grad_fn is not None:
                on_gradient(tensor, lambda _: reached(unit.number, place, use))
        if not self.under_way or not tensors or self._num_kept is None:
            return True
        last = list(dict.fromkeys(reversed(order.before)))
        return unit.number in last[: self._num_kept]

    # ------------------------------------------------------------------ backward

    def _output_reached(self, number: int, place: int | None = None, use: UnitUse | None = None) -> None:
        """Make a unit whole when its output has a gradient; RuntimeError with create_graph."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not possible with FullyShardedDataParallel: the gradients of gradients "
                "would read parameters that are freed by then. Use ShardedDataParallel"
            )
        self._need_in_backward(number, place)
        if use is not None:
            self.units[number].reach(use)

    def _input_reached(self, number: int, use: UnitUse) -> None:
        if self.units[number].take_input(use):
            self._free_unused([self.units[number]])

    def _need_in_backward(self, number: int, place: int | None = None) -> None:
        if not self._backward.is_under_way:
            end = partial(weakly(self._end_backward), self._backward.begin())
            self._places.begin()
            when_backward_ends(end, partial(end, broke_off=True))
        self._at(Moment.BEFORE_BACKWARD, self.units[number].buckets, Purpose.BACKWARD)
        self._places.reached(number, place)
        following = self._backward.reached(number)
        buckets = _buckets_of(map(self.units.__getitem__, following))
        self._at(Moment.BEFORE_BACKWARD, buckets, Purpose.BACKWARD, only=Operation.GATHER)
        for each in following:
            self._places.gathered(each)

    def gradient_came(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        for unit in self._waiting.get(index, ()):
            if unit.take_gradient(index):
                self._free_unused([unit])

    def begin_backward(self, current: BackwardPass) -> None:
        """Note that a backward pass begins or began, of which full buckets may wait for launches here."""
        self._places.begin(current)

    def _end_backward(self, order: list[int], *, broke_off: bool = False) -> None:
        """End a backward pass with this order, if it has not ended; after an exception wait for nothing."""
        if order is not self._backward.now or not self._backward.is_under_way:
            return
        self._backward.end(broke_off=broke_off)
        self._places.end()
        for unit in self.units:
            unit.end_pass()
        if not broke_off:
            self._free_unused(self.units, Moment.AFTER_BACKWARD)

    # ------------------------------------------------------------------ on request

    def check_unpinned(self) -> None:
        """Raise RuntimeError if parameters of any unit are needed whole, or were given other memory."""
        for bucket in self.buckets:
            bucket.refresh()

    @contextmanager
    def on_request(self, units: Sequence[Unit], *, as_kept: bool, tells: bool = True) -> Iterator[UnitValues]:
        """Yield whole values of units, ``as_kept`` in the owners' dtype; if it ``tells``, errors raise."""
        held, wide, tells = list(units), list[WideBucket](), tells and not self.under_way
        if as_kept and any(bucket.is_rounded for bucket in _buckets_of(units)):
            self.check_unpinned()  # of all, so that a walk over modules raises before it has changed anything
            held, wide = [], list(map(WideBucket, _buckets_of(units)))
            self._at(Moment.BEFORE_FORWARD, wide, Purpose.AS_KEPT)
        elif tells:
            self.gathers.stamps.begin_pass()
        request = UnitValues({param: param for unit in held for param in unit.params})
        request.values.update(pair for bucket in wide for pair in bucket.values.items())
        self._requested += held
        try:
            self._at(Moment.BEFORE_FORWARD, _buckets_of(held), Purpose.REQUEST, tells=tells)
            yield request
        finally:
            request.values.clear()
            for unit in held:
                self._requested.remove(unit)
            try:
                for bucket in wide or _buckets_of(held) if request.are_written else ():
                    bucket.take_written()
            finally:
                if not (self._backward.is_under_way and in_backward()):  # which may need them
                    self._free_unused(held)

    @contextmanager
    def pinned(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let nobody step, load or save units that are whole, inside a ``with``."""
        for bucket in _buckets_of(units):
            bucket.pin()
        self._reads.begin(units)
        try:
            yield
        finally:
            self._reads.end(units)
            for bucket in _buckets_of(units):
                bucket.unpin()
            self._members.accept_names({param for unit in units for param in unit.params})


def _buckets_of(units: Iterable[Unit]) -> list[RowBucket]:
    return [bucket for unit in units for bucket in unit.buckets]


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Return the units of a model, or of one that a module is in; None if there are none."""
    return next(filter(None, map(UnitsInUse.on, model.modules())), None)


def units_at(module: nn.Module) -> UnitsInUse | None:
    """Return the units of a module that was itself wrapped or sharded in place, or None."""
    units = UnitsInUse.on(module)
    return units if units is not None and units.model is module else None
