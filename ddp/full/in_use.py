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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.autograd import in_backward
from zero_optim.ddp.full.guards import UnitMembers
from zero_optim.ddp.full.launch_order import LaunchOrder
from zero_optim.ddp.full.saved_reads import SavedReads
from zero_optim.ddp.full.unit import Unit, UnitOrder, UnitTask, UnitUse, UnitValues
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
    from zero_optim.ddp.full.construction import Arguments
    from zero_optim.ddp.fully_sharded import FullyShardedDataParallel

_MODULE = attrgetter("module")
_SECOND = (
    "create_graph=True is not possible with FullyShardedDataParallel: the gradients of gradients would read "
    "parameters that are freed by then. Use ShardedDataParallel"
)


class UnitsInUse(ModuleCalls, Uncopied):
    """Gathers and frees the units of a model. All ranks make the same calls, in one order; communicates."""

    def __init__(self, wrapper: "FullyShardedDataParallel", units: Sequence[Unit], how: "Arguments") -> None:
        super().__init__(wrapper.module)
        self.units = units  # by number
        self.unit_of: dict[nn.Module, Unit] = {}  # of modules whose calls need one
        self.keepalive: FullyShardedDataParallel | None = None  # the wrapper, if it wraps in place
        self._before, self._after = weakly(wrapper.before_forward), weakly(wrapper.after_forward)
        self._keeps = how.num_kept  # the last ones, which stay whole until the backward pass; None for all
        self._forward = defaultdict[Unit, UnitOrder](UnitOrder)  # by the one whose call is the outermost
        self._backward = UnitOrder()
        self._waiting: dict[int, list[Unit]] = {}  # by the index of a parameter
        for unit in units:
            for index in unit.waits_for:
                self._waiting.setdefault(index, []).append(unit)
        self._reached = weakly(self._output_reached)
        self._reads = SavedReads(units, self._reached, is_on=how.guards_reads)
        self.unfinished: list[Callable[[], None]] = []  # end state dicts that broke off
        self._members = UnitMembers(self.model)

    def use(self, group: RankGroup, engine: Engine, gathers: UnitGathers, places: LaunchOrder) -> None:
        """Gather for this optimizer from now on; its ranks are the same as before."""
        self.group, self._engine, self.gathers, self._places = group, engine, gathers, places

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

    def _task(self, purpose: Purpose, tells: bool = False) -> UnitTask:
        return UnitTask(self.units, self.gathers, purpose, tells=tells)

    def _at(self, moment: Moment, buckets: Sequence[Any], purpose: Purpose, tells: bool = False) -> None:
        if buckets:
            self._engine.on(moment, buckets, self._task(purpose, tells))

    def _fetch(self, number: int | None, purpose: Purpose, tells: bool = False) -> None:
        """Start the gather of a unit ahead of the moment that waits for it."""
        if number is not None:
            buckets, task = self.units[number].buckets, self._task(purpose, tells)
            self._engine.on(Moment.BEFORE_FORWARD, buckets, task, Operation.GATHER)

    def _free_unused(self, units: Iterable[Unit], moment: Moment = Moment.AFTER_MODULE) -> None:
        unused = [bucket for unit in units if not self._num_users(unit) for bucket in unit.buckets]
        self._at(moment, unused, Purpose.BACKWARD)

    # ------------------------------------------------------------------ forward

    def _num_users(self, unit: Unit) -> int:
        return unit.holds + list(map(self.unit_of.get, map(_MODULE, self.under_way))).count(unit)

    def begin_pass(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - the user's
        """Forget what an exception has ended without a hook, as a Ctrl-C does; then the wrapper begins."""
        while self.unfinished:
            self.unfinished[-1]()
        if not in_backward():
            self._break_off(self._backward.now)  # a thread of the engine may not have let go of it yet
        if isinstance(self._reads.user, Call):
            self._reads.end(self._reads.user)
        return self._before(args, kwargs)

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Make a unit whole for a call."""
        unit, goes_back = self.unit_of[module], in_backward()
        is_outermost, is_used = len(self.under_way) == 1, self._num_users(unit) > 1
        if unit.has_frozen and not is_used:
            unit.passage = self._watch_inputs(unit, inputs)
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
        order = self._forward[self.unit_of[self.under_way[0].module]]
        if is_outermost:
            order.begin()
        self._fetch(order.reached(unit.number), purpose, tells=True)

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        """Free a unit, unless it is used on. Copies a returned view of a parameter, which would die."""
        unit, still = self.unit_of[call.module], False
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
        unit, outermost, stays = self.unit_of[call.module], (self.under_way or [call])[0], False
        order = self._forward[self.unit_of[outermost.module]]
        if torch.is_grad_enabled() and tensors is not None:
            stays = self._watch(unit, tensors, order)
        if not stays:
            self._at(Moment.AFTER_FORWARD, unit.buckets, Purpose.TRAINING)
        if not self.under_way:
            order.end()
            for each in self.units:
                if any(bucket.gathers.is_unclaimed for bucket in each.buckets):  # fetched, and not needed
                    self._at(Moment.AFTER_FORWARD, each.buckets, Purpose.TRAINING)

    def _watch_inputs(self, unit: Unit, inputs: object) -> UnitUse | None:
        """Return a passage that ends when all inputs of a call have their gradients."""
        if not torch.is_grad_enabled() or (in_backward() and unit.passages):
            return None
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        passage, reached = UnitUse(len(tensors), in_backward()), weakly(self._input_reached)
        for tensor in tensors:
            on_gradient(tensor, lambda _: reached(unit.number, passage))
        if passage.is_again:  # reentrant checkpointing goes back through what is computed now
            unit.passages[passage] = passage.num_inputs
        return passage

    def _watch(self, unit: Unit, tensors: list[Tensor], order: UnitOrder) -> bool:
        """Make a unit whole before the backward pass comes to it; return whether it stays until then."""
        reached, place, passage = self._reached, self.clock, unit.passage
        for tensor in tensors:
            if tensor.grad_fn is not None:
                on_gradient(tensor, lambda _: reached(unit.number, place, passage))
        if not self.under_way or not tensors or self._keeps is None:
            return True
        last = list(dict.fromkeys(reversed(order.before)))
        return unit.number in last[: self._keeps]

    # ------------------------------------------------------------------ backward

    def _output_reached(self, number: int, place: int | None = None, passage: UnitUse | None = None) -> None:
        """Make a unit whole when its output has a gradient; RuntimeError with create_graph."""
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND)
        self._need_in_backward(number, place)
        if passage is not None:
            unit = self.units[number]
            left = {each: num for each, num in unit.passages.items() if not each.is_again}
            unit.passages = {**left, passage: passage.num_inputs}  # what was computed again, was for this one

    def _input_reached(self, number: int, passage: UnitUse) -> None:
        unit = self.units[number]
        if passage in unit.passages:
            unit.passages[passage] -= 1
            if not unit.passages[passage]:
                del unit.passages[passage]
                self._free_if_done(unit)

    def _need_in_backward(self, number: int, place: int | None = None) -> None:
        if not self._backward.is_under_way:
            broke_off = partial(weakly(self._break_off), self._backward.begin())
            self._places.begin()
            when_backward_ends(weakly(self._end_backward), broke_off)
        self._at(Moment.BEFORE_BACKWARD, self.units[number].buckets, Purpose.BACKWARD)
        self._places.reached(number, place)
        following = self._backward.reached(number)
        self._fetch(following, Purpose.BACKWARD)
        self._places.gathered(following)

    def gradient_came(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        for unit in self._waiting.get(index, ()):
            unit.arrived.add(index)
            self._free_if_done(unit)

    def _free_if_done(self, unit: Unit) -> None:
        if not unit.passages and unit.arrived >= unit.waits_for:
            unit.arrived.clear()
            self._free_unused([unit])

    def _end_backward(self) -> None:
        self._end_order()
        self._free_unused(self.units, Moment.AFTER_BACKWARD)

    def _break_off(self, order: list[int]) -> None:
        """End a backward pass with this order, if it has not ended, after an exception; waits for nothing."""
        if order is self._backward.now and self._backward.is_under_way:
            self._end_order(broke_off=True)

    def _end_order(self, *, broke_off: bool = False) -> None:
        self._backward.end(broke_off=broke_off)
        self._places.end()
        for unit in self.units:
            unit.arrived.clear()
            unit.passages.clear()

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
        for unit in held:
            unit.holds += 1
        try:
            self._at(Moment.BEFORE_FORWARD, _buckets_of(held), Purpose.REQUEST, tells)
            yield request
        finally:
            request.values.clear()
            for unit in held:
                unit.holds -= 1
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
