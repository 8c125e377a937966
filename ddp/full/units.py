"""Units at run time: gathered before they are used, freed after it, the next one on its way meanwhile.

Note [When a unit is whole]
    A unit is gathered when one of its modules is called, and freed when the outermost call of them returns.
    The outermost unit of a training step stays, as the backward pass begins with it. In the backward pass a
    unit is gathered when the gradient of its output is there, and freed when all of its parameters have
    theirs. Frozen ones get none, so a unit with some waits also for the gradients of the tensors that its
    module was called with. At the end of the pass everything is freed. While activations are computed again
    (checkpointing), nothing is freed when a call returns, as the backward pass needs it next.

    Each module that has parameters looks after its own unit, so a model's other methods, which call modules
    without going through the outermost one, find whole parameters too.

    What autograd saved may be views of a unit's storage, so the backward pass must not begin with a unit
    before it is whole. A hook on the outputs sees to that. If a module returns no tensor that can be
    found (`tensors_in`), its unit is not freed after the forward pass.

    Which unit is fetched beside another one, Note [The next unit] in `zero_optim.ddp.full.unit_order` says.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import in_backward
from zero_optim.ddp.full.saved_reads import SavedReads
from zero_optim.ddp.full.unit import Passage, Unit
from zero_optim.ddp.full.unit_order import UnitOrder
from zero_optim.ddp.full.unit_supply import UnitSupply
from zero_optim.ddp.reducer.graph import tensors_in
from zero_optim.ddp.reducer.inbox import weakly, when_backward_ends
from zero_optim.health.unit_marks import Purpose
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.shard.uncopied import Uncopied
from zero_optim.shard.unit_gathers import UnitGathers

if TYPE_CHECKING:
    from zero_optim.ddp.owners.launch_places import LaunchPlaces

_SECOND = (
    "create_graph=True is not possible with FullyShardedDataParallel: the gradients of gradients would read "
    "parameters that are freed by then. Use ShardedDataParallel"
)


class _Call(NamedTuple):
    """A call that is under way.

    Attributes:
        number: of the unit that it uses.
        guards: it has begun to watch what autograd saves.
        passage: what a backward pass will go through; None where nobody waits for that.
    """

    number: int
    guards: bool
    passage: Passage | None = None


class UnitsInUse(Uncopied):
    """Gathers and frees the units of a model. All ranks make the same calls, in the same order; communicates.

    Args:
        group: the ranks.
        gathers: starts the gathers.
        units: by number.
        keeps: how many of the units that a forward pass used last stay whole until the backward pass; None
            for all.
        stamps: what the gathers of forward passes tell of steps.
        guards_reads: whether to see reads in the backward pass that no output announces: Note [Reads that no
            output announces] in `zero_optim.ddp.full.saved_reads`.

    Attributes:
        units: as given.
        supply: makes them whole and frees them.
        unfinished: for each state dict or load that is under way, what gives a module its own parameters back
            if an exception has ended it. Called when the next forward pass begins.
        places: where buckets of gradients are launched, between gathers; None until there is a reducer.
    """

    def __init__(
        self,
        group: RankGroup,
        gathers: UnitGathers,
        units: Sequence[Unit],
        keeps: int | None,
        stamps: UnitStamps,
        *,
        guards_reads: bool = True,
    ) -> None:
        self.units = units
        self.supply = UnitSupply(units, group, gathers, stamps)
        self._keeps = keeps
        self._forward: dict[int, UnitOrder] = {}  # by the unit whose call is the outermost
        self._backward = UnitOrder()
        self._num_backwards = 0
        self._calls: list[_Call] = []  # the outermost first
        self._waiting: dict[int, list[Unit]] = {}  # by the parameter
        for unit in units:
            for index in unit.waits_for:
                self._waiting.setdefault(index, []).append(unit)
        self._reads = SavedReads(units, weakly(self._output_reached), is_on=guards_reads)
        self.unfinished: list[Callable[[], None]] = []
        self.places: LaunchPlaces | None = None

    @property
    def is_outermost_call(self) -> bool:
        """Whether one call is under way, which lies in no other."""
        return len(self._calls) == 1

    @property
    def group(self) -> RankGroup:
        """The ranks."""
        return self.supply.group

    def nbytes_live(self) -> int:
        """Bytes of the flat tensors that are there right now, beside what this rank keeps for good."""
        return sum(bucket.nbytes_live for unit in self.units for bucket in unit.buckets)

    # ------------------------------------------------------------------ forward

    def forget_calls(self) -> None:
        """Take note that no call is under way: PyTorch runs no hook when a Ctrl-C ends one."""
        while self.unfinished:
            self.unfinished[-1]()
        if self._backward.is_under_way and not in_backward():
            self._break_off()  # a thread of the engine may not have let go of it yet
        if not self._calls:
            return
        while self._calls:
            if self._calls.pop().guards:
                self._reads.end()
        for unit in self.units:
            unit.depth = max((bucket.num_pins for bucket in unit.buckets), default=0)

    def enter(self, unit: Unit, inputs: object = None, *, tells: bool = True) -> None:
        """Get ready for a call of a module with parameters of a unit, or of the unit's own.

        Args:
            unit: the unit.
            inputs: what its module is called with.
            tells: the user calls it, and its gather tells what other ranks did differently, see
                `UnitSupply.start`. If it raises, `leave` has to be called all the same.
        """
        passage = self._watch_inputs(unit, inputs) if unit.has_frozen and not unit.depth else None
        self._calls.append(_Call(unit.number, self._reads.begin(), passage))
        unit.depth += 1
        if unit.is_whole and (unit.depth > 1 or in_backward()):
            unit.arrive()  # perhaps it was gathered on another stream
            return
        if in_backward():  # activations are computed again
            self._need_in_backward(unit.number)
            return
        self._begin_to_tell(tells=tells)
        purpose = _purpose() if tells else Purpose.REQUEST
        if self.places is not None and tells:
            self.places.called(unit.number, is_outermost=len(self._calls) == 1)
        self.supply.need(unit, purpose, tells=tells)
        order = self._forward.setdefault(self._calls[0].number, UnitOrder())
        if len(self._calls) == 1:
            order.begin()
        self.supply.fetch(order.reached(unit.number), purpose, tells=tells)

    def _begin_to_tell(self, *, tells: bool) -> None:
        if tells and len(self._calls) < 2:
            self.supply.stamps.begin_pass()

    def leave(self, unit: Unit, output: object) -> None:
        """Take note that a call has returned.

        Args:
            unit: the unit.
            output: of the call; None if it raised.
        """
        outermost, call = self._calls[0].number, self._calls.pop()
        if call.guards:
            self._reads.end()
        unit.depth -= 1
        if unit.depth:
            return
        keeps = False
        if torch.is_grad_enabled() and output is not None:
            keeps = self._watch(unit, output, call.passage, is_outermost=not self._calls)
        if in_backward():
            return
        order = self._forward.get(outermost, UnitOrder())
        if not keeps:
            self.supply.free(unit)
        if not self._calls:
            order.end()
            self.supply.free_fetched()

    def _watch_inputs(self, unit: Unit, inputs: object) -> Passage | None:
        """Have it known when all inputs of a call have their gradients."""
        if not torch.is_grad_enabled() or (in_backward() and unit.passages):
            return None
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        passage, reached = Passage(len(tensors), in_backward()), weakly(self._input_reached)
        for tensor in tensors:
            untyped: Any = tensor
            untyped.register_hook(lambda _: reached(unit.number, passage))
        if passage.is_again:  # reentrant checkpointing goes back through what is computed now
            unit.passages[passage] = passage.num_inputs
        return passage

    def _watch(self, unit: Unit, output: object, passage: Passage | None, *, is_outermost: bool) -> bool:
        """Have a unit made whole before the backward pass comes to it.

        Returns:
            Whether it stays whole until then.
        """
        found = list(tensors_in(output))
        tensors = [tensor for tensor in found if tensor.grad_fn is not None]
        if not in_backward():
            reached = weakly(self._output_reached)
            place = None if self.places is None else self.places.returned()
            for tensor in tensors:
                untyped: Any = tensor
                untyped.register_hook(lambda _: reached(unit.number, place, passage))
        return is_outermost or not found or self._is_kept(unit)

    def _is_kept(self, unit: Unit) -> bool:
        """Whether a unit is one of the last in the order of the pass before."""
        if self._keeps is None:
            return True
        order = self._forward[self._calls[0].number].before if self._calls else []
        last = list(dict.fromkeys(reversed(order)))[: self._keeps]
        return unit.number in last

    # ------------------------------------------------------------------ backward

    def _output_reached(self, number: int, place: int | None = None, passage: Passage | None = None) -> None:
        """Make a unit whole, as the gradient of its output is there; called by the output's hook.

        Args:
            number: of the unit.
            place: of the call, see `LaunchPlaces`.
            passage: of the call, if it has inputs whose gradients are waited for.

        Raises:
            RuntimeError: the pass is to be differentiated itself.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND)
        self._need_in_backward(number, place)
        if passage is not None:
            passages = self.units[number].passages
            for again in [other for other in passages if other.is_again]:  # it saved for this one
                del passages[again]
            passages[passage] = passage.num_inputs

    def _input_reached(self, number: int, passage: Passage) -> None:
        """Take note that an input has its gradient; called by its hook."""
        unit = self.units[number]
        if passage not in unit.passages:
            return
        unit.passages[passage] -= 1
        if not unit.passages[passage]:
            del unit.passages[passage]
            self._free_if_done(unit)

    def _need_in_backward(self, number: int, place: int | None = None) -> None:
        """Make a unit whole in a backward pass, and fetch the next one."""
        self._begin_backward()
        self.supply.need(self.units[number], Purpose.BACKWARD)
        if self.places is not None:
            self.places.reached(number, place)
        following = self._backward.reached(number)
        self.supply.fetch(following, Purpose.BACKWARD)
        if self.places is not None:
            self.places.gathered(following)

    def _begin_backward(self) -> None:
        if not self._backward.is_under_way:
            self._backward.begin()
            if self.places is not None:
                self.places.begin()
            self._num_backwards += 1
            broke_off = partial(weakly(self._break_off), self._num_backwards)
            when_backward_ends(weakly(self._end_backward), broke_off)

    def gradient_came(self, index: int) -> None:
        """Take note that a parameter has its gradient, by its index; called by its hook."""
        for unit in self._waiting.get(index, ()):
            unit.arrived.add(index)
            self._free_if_done(unit)

    def _free_if_done(self, unit: Unit) -> None:
        if unit.is_done:
            unit.arrived.clear()
            self.supply.free_unused([unit])

    def _end_backward(self) -> None:
        self._backward.end()
        if self.places is not None:
            self.places.end()
        self.free_all()

    def _break_off(self, number: int | None = None) -> None:
        """Take note that an exception has ended a backward pass; what is under way is waited for later.

        Args:
            number: of the pass, which may have ended long ago; None for the one that is under way.
        """
        if number not in (None, self._num_backwards) or not self._backward.is_under_way:
            return
        self._backward.break_off()
        if self.places is not None:
            self.places.end()
        for unit in self.units:
            unit.forget_pass()

    def free_all(self) -> None:
        """Free every unit that no call is using."""
        for unit in self.units:
            unit.forget_pass()
        self.supply.free_unused()

    # ------------------------------------------------------------------ on request

    @contextmanager
    def whole(self, numbers: Sequence[int], *, writes: bool) -> Iterator[None]:
        """Make units whole for the time of a ``with``; all ranks enter and leave it.

        Args:
            numbers: of the units.
            writes: when it ends, owners take over what was written to their rows.
        """
        units = [self.units[number] for number in numbers]
        tells = not self._calls
        self._begin_to_tell(tells=tells)
        for unit in units:
            self.supply.start(unit, Purpose.REQUEST, tells=tells)
        for unit in units:
            self.supply.need(unit, Purpose.REQUEST)
        for unit in units:
            self.supply.pin(unit, 1)
        guards = self._reads.begin()
        try:
            if tells:
                self.supply.stamps.look()
            yield
        finally:
            if guards:
                self._reads.end()
            for unit in units:
                self.supply.pin(unit, -1)
            try:
                for unit in units if writes else ():
                    self.take_written(unit)
            finally:
                self.supply.free_unused(units)

    def take_written(self, unit: Unit) -> None:
        """Have owners take over what was written to the whole parameters of a unit."""
        for bucket in unit.buckets:
            bucket.take_written()

    def index_of(self, param: Tensor) -> int | None:
        """Find the unit of a parameter."""
        for unit in self.units:
            if any(param is member for member in unit.params):
                return unit.number
        return None


def _purpose() -> Purpose:
    """What a forward pass gathers for."""
    return Purpose.TRAINING if torch.is_grad_enabled() else Purpose.EVALUATION
