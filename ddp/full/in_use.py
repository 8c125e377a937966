"""The units of a model at run time: gathered before they are used, freed after it, the next one on its way.

Note [When a unit is whole]
    A unit is gathered when one of its modules is called, and freed when the outermost call of them returns.
    The outermost unit of a training step stays, as the backward pass begins with it. In the backward pass a
    unit is gathered when the gradient of its output is there, and freed when all of its parameters have
    theirs. Frozen ones get none, so a unit with some also waits for the gradients of its module's inputs. At
    the end of the pass everything is freed. Where a backward pass computes activations again, nothing is
    freed when a call returns. If a module returns no tensor that `tensors_in` sees, its unit stays whole.

Note [The next unit]
    The order in which the pass before needed units tells which one is needed next. Its gather starts when the
    one before is whole. There is an order for each outermost module that is called, and one for backward
    passes. It is the same on every rank if the ranks call the same modules, as they must.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import in_backward
from zero_optim.ddp.full.launch_places import LaunchPlaces
from zero_optim.ddp.full.saved_reads import SavedReads
from zero_optim.ddp.full.unit import Passage, Unit, UnitOrder
from zero_optim.ddp.reducer.graph import on_gradient, tensors_in
from zero_optim.ddp.reducer.inbox import weakly, when_backward_ends
from zero_optim.errors import RankMismatchError
from zero_optim.flow.schedule import ZERO3, ZERO3_KEPT, Moment, Operation, Schedule
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.row_bucket import RowBucket, Uncopied, WideBucket

if TYPE_CHECKING:
    from zero_optim.ddp.full.guards import UnitMembers

_SECOND = (
    "create_graph=True is not possible with FullyShardedDataParallel: the gradients of gradients would read "
    "parameters that are freed by then. Use ShardedDataParallel"
)


class _Call(NamedTuple):
    number: int  # of the unit
    guards: bool  # it has begun to watch what autograd saves
    passage: Passage | None  # what a backward pass will go through, where somebody waits for that


class UnitsInUse(Uncopied):
    """Gathers and frees the units of a model. All ranks make the same calls, in one order; communicates."""

    def __init__(self, units: Sequence[Unit], keeps: int | None, *, guards_reads: bool = True) -> None:
        self.units = units  # by number
        self._keeps = keeps  # how many, the last ones, stay whole until the backward pass; None for all
        self._forward: dict[int, UnitOrder] = {}  # by the unit whose call is the outermost
        self._backward = UnitOrder()
        self._calls: list[_Call] = []  # the outermost first
        self._waiting: dict[int, list[Unit]] = {}  # by the index of a parameter
        for unit in units:
            for index in unit.waits_for:
                self._waiting.setdefault(index, []).append(unit)
        self._reads = SavedReads(units, weakly(self._output_reached), is_on=guards_reads)
        self.unfinished: list[Callable[[], None]] = []  # end state dicts that broke off
        self.members: UnitMembers

    def use(self, group: RankGroup, gathers: UnitGathers, places: LaunchPlaces) -> None:
        """Gather for this optimizer from now on; its ranks are the same as before."""
        self.group, self.gathers, self._places = group, gathers, places

    @property
    def buckets(self) -> list[RowBucket]:
        """Those of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def is_called(self) -> bool:
        """Whether a call is under way, or was when a Ctrl-C ended it."""
        return bool(self._calls)

    @property
    def is_outermost_call(self) -> bool:
        """Whether one call is under way, which lies in no other."""
        return len(self._calls) == 1

    def nbytes_live(self) -> int:
        """Bytes of the flat tensors that are there now, beside what this rank keeps for good."""
        return sum(bucket.nbytes_live for bucket in self.buckets)

    # ------------------------------------------------------------------ operations

    def _at(
        self, moment: Moment, unit: Unit, purpose: Purpose, tells: bool = False, schedule: Schedule = ZERO3
    ) -> None:
        operations: dict[Operation, Callable[[Unit, Purpose, bool], None]] = {
            Operation.GATHER: self._gather,
            Operation.WAIT: self._wait,
            Operation.FREE: self._free,
        }
        schedule.at(moment, operations, unit, purpose, tells)

    def _gather(self, unit: Unit, purpose: Purpose, tells: bool) -> None:
        for bucket in unit.buckets:
            if not bucket.is_whole and not bucket.gathers.is_unclaimed:
                bucket.gathers.start(partial(self.gathers.start, bucket, purpose, tells=tells))

    def _wait(self, unit: Unit, _: object, tells: bool) -> None:
        """Wait until a unit is whole; frees it, and RankMismatchError, if a rank gathered another."""
        with self._forgetting(unit):
            unit.arrive()
            self.gathers.stamps.check()
        if tells:
            self.gathers.stamps.look()

    def _free(self, unit: Unit, *_: object) -> None:
        with self._forgetting(unit):
            for bucket in unit.buckets:
                bucket.free()

    @contextmanager
    def _forgetting(self, unit: Unit) -> Iterator[None]:
        """If ranks gather different units, free this one and forget other gathers: they may never come."""
        try:
            yield
        except RankMismatchError:
            for bucket in self.buckets:
                bucket.gathers.abandon()
            self.gathers.abandon()
            for bucket in unit.buckets:
                bucket.free()
            raise

    def _fetch(self, number: int | None, purpose: Purpose, tells: bool = False) -> None:
        if number is not None:
            self._gather(self.units[number], purpose, tells)

    def _free_unused(self, units: Iterable[Unit] | None = None) -> None:
        for unit in self.units if units is None else units:
            if not unit.depth:
                self._at(Moment.AFTER_BACKWARD, unit, Purpose.BACKWARD)

    # ------------------------------------------------------------------ forward

    def forget_calls(self) -> None:
        """Forget calls and passes that an exception has ended without a hook, as a Ctrl-C does."""
        while self.unfinished:
            self.unfinished[-1]()
        if self._backward.is_under_way and not in_backward():
            self._end_order(broke_off=True)  # a thread of the engine may not have let go of it yet
        if not self._calls:
            return
        while self._calls:
            if self._calls.pop().guards:
                self._reads.end()
        for unit in self.units:
            unit.depth = max((bucket.num_pins for bucket in unit.buckets), default=0)

    def enter(self, unit: Unit, inputs: object) -> None:
        """Make a unit whole for a call; `leave` has to be called also if it raises."""
        passage = self._watch_inputs(unit, inputs) if unit.has_frozen and not unit.depth else None
        self._calls.append(_Call(unit.number, self._reads.begin(), passage))
        unit.depth += 1
        if unit.is_whole and (unit.depth > 1 or in_backward()):
            unit.arrive()  # perhaps it was gathered on another stream
            return
        if in_backward():  # activations are computed again
            self._need_in_backward(unit.number)
            return
        is_outermost = self.is_outermost_call
        if is_outermost:
            self.gathers.stamps.begin_pass()
        purpose = Purpose.TRAINING if torch.is_grad_enabled() else Purpose.EVALUATION
        self._places.called(unit.number, is_outermost=is_outermost)
        self._at(Moment.BEFORE_FORWARD, unit, purpose, tells=True)
        order = self._forward.setdefault(self._calls[0].number, UnitOrder())
        if is_outermost:
            order.begin()
        self._fetch(order.reached(unit.number), purpose, tells=True)

    def leave(self, unit: Unit, output: object) -> None:
        """Free a unit after a call, unless it is used on; the output is None if the call raised."""
        if not self._calls:  # a hook in front of the one that calls `enter` has raised
            return
        outermost, call = self._calls[0].number, self._calls.pop()
        if call.guards:
            self._reads.end()
        unit.depth -= 1
        if unit.depth:
            return
        if in_backward():  # activations are computed again
            return
        stays = False
        if torch.is_grad_enabled() and output is not None:
            stays = self._watch(unit, output, call.passage)
        self._at(Moment.AFTER_FORWARD, unit, Purpose.TRAINING, schedule=ZERO3_KEPT if stays else ZERO3)
        if not self._calls:
            if outermost in self._forward:
                self._forward[outermost].end()
            for other in self.units:  # what was fetched and not needed
                if any(bucket.gathers.is_unclaimed for bucket in other.buckets):
                    self._free(other)

    def _watch_inputs(self, unit: Unit, inputs: object) -> Passage | None:
        """Return a passage that ends when all inputs of a call have their gradients."""
        if not torch.is_grad_enabled() or (in_backward() and unit.passages):
            return None
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        passage, reached = Passage(len(tensors), in_backward()), weakly(self._input_reached)
        for tensor in tensors:
            on_gradient(tensor, lambda _: reached(unit.number, passage))
        if passage.is_again:  # reentrant checkpointing goes back through what is computed now
            unit.passages[passage] = passage.num_inputs
        return passage

    def _watch(self, unit: Unit, output: object, passage: Passage | None) -> bool:
        """Make a unit whole before the backward pass comes to it; return whether it stays until then."""
        tensors = list(tensors_in(output))
        reached = weakly(self._output_reached)
        place = self._places.returned()
        for tensor in tensors:
            if tensor.grad_fn is not None:
                on_gradient(tensor, lambda _: reached(unit.number, place, passage))
        if not self._calls or not tensors or self._keeps is None:
            return True
        last = list(dict.fromkeys(reversed(self._forward[self._calls[0].number].before)))
        return unit.number in last[: self._keeps]

    # ------------------------------------------------------------------ backward

    def _output_reached(self, number: int, place: int | None = None, passage: Passage | None = None) -> None:
        """Make a unit whole when its output has a gradient; RuntimeError with create_graph."""
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND)
        self._need_in_backward(number, place)
        if passage is not None:
            passages = self.units[number].passages
            for again in [other for other in passages if other.is_again]:  # it saved for this one
                del passages[again]
            passages[passage] = passage.num_inputs

    def _input_reached(self, number: int, passage: Passage) -> None:
        unit = self.units[number]
        if passage not in unit.passages:
            return
        unit.passages[passage] -= 1
        if not unit.passages[passage]:
            del unit.passages[passage]
            self._free_if_done(unit)

    def _need_in_backward(self, number: int, place: int | None = None) -> None:
        if not self._backward.is_under_way:
            broke_off = partial(weakly(self._break_off), self._backward.begin())
            self._places.begin()
            when_backward_ends(weakly(self._end_backward), broke_off)
        self._at(Moment.BEFORE_BACKWARD, self.units[number], Purpose.BACKWARD)
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
        if unit.is_done:
            unit.arrived.clear()
            self._free_unused([unit])

    def _end_backward(self) -> None:
        self._end_order()
        self._free_unused()

    def _break_off(self, order: list[int]) -> None:
        """End a backward pass with this order, if it has not ended, after an exception; waits for nothing."""
        if order is self._backward.now:
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

    def gather_as_kept(self, unit: Unit) -> list[WideBucket]:
        """Gather a unit as its owners keep it, beside the parameters; RuntimeError if they are pinned."""
        self.check_unpinned()  # of all, so that a walk over modules raises before it has changed anything
        wide = [WideBucket(bucket) for bucket in unit.buckets]
        for pending in [self.gathers.start(bucket, Purpose.AS_KEPT) for bucket in wide]:
            pending.wait()
        return wide

    def hold(self, unit: Unit) -> None:
        """Make a unit whole until `release`, for a state dict or a load."""
        self._at(Moment.BEFORE_FORWARD, unit, Purpose.REQUEST)
        unit.depth += 1

    def release(self, unit: Unit) -> None:
        """Free a unit that was held, unless somebody else uses it."""
        unit.depth -= 1
        if not in_backward():
            self._free_unused([unit])

    @contextmanager
    def whole(self, numbers: Sequence[int], *, writes: bool) -> Iterator[None]:
        """Make units whole inside a ``with``, on all ranks; owners take over what it ``writes``."""
        units = [self.units[number] for number in numbers]
        tells = not self._calls
        if tells:
            self.gathers.stamps.begin_pass()
        for unit in units:
            self._gather(unit, Purpose.REQUEST, tells)
        for unit in units:
            self._at(Moment.BEFORE_FORWARD, unit, Purpose.REQUEST)
        for unit in units:
            _pin(unit, 1)
        guards = self._reads.begin()
        try:
            if tells:
                self.gathers.stamps.look()
            yield
        finally:
            if guards:
                self._reads.end()
            for unit in units:
                _pin(unit, -1)
            try:
                for unit in units if writes else ():
                    unit.take_written()
                self.members.accept_names({param for unit in units for param in unit.params})
            finally:
                self._free_unused(units)


def _pin(unit: Unit, more: int) -> None:
    unit.depth += more
    for bucket in unit.buckets:
        bucket.num_pins += more
