"""One unit, what the engine does to its buckets, and the order in which units are needed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat.autograd import in_backward
from zero_optim.ddp.reducer.graph import on_gradient
from zero_optim.errors import RankMismatchError
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.engine import Engine
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.module_calls import Call
from zero_optim.shard.rows.row_values import RowValues
from zero_optim.shard.task import Task

OUTERMOST = "the outermost unit"
_IS_WHOLE, _NEEDS_GATHER = attrgetter("values.is_whole"), attrgetter("values.needs_gather")


@dataclass(frozen=True, slots=True, eq=False)
class UnitUse:
    """A call of a unit, for the backward pass through it; `is_again`: it computes activations again."""

    num_inputs: int  # that require a gradient
    is_again: bool


@dataclass(slots=True, eq=False)
class Unit:
    """The parameters of a unit, and how far a backward pass has come with it."""

    number: int  # 0 is the outermost
    name: str
    buckets: list[Bucket[RowValues]]
    # Parameters, by index, whose gradients must be there before it is freed in a backward pass: its own that
    # are trained; where some are frozen, also those of units inside it.
    waits_for: frozenset[int]
    has_frozen: bool  # so it also waits for the gradients of its inputs
    use: UnitUse | None = None  # of its call under way, if that waits for its inputs' gradients
    _arrived: set[int] = field(default_factory=set)  # parameters with a gradient in this backward pass
    # Calls whose outputs this backward pass has reached, each with how many of its inputs still lack their
    # gradients; 0 if none has one: then the unit stays whole until the end of the pass.
    _uses: dict[UnitUse, int] = field(default_factory=dict)

    def begin_use(self, inputs: Sequence[Tensor], came: Callable[[int, UnitUse], None]) -> None:
        """Have ``came`` called with the gradients of a call's inputs, if a backward pass waits for them."""
        is_again, self.use = in_backward(), None
        if not torch.is_grad_enabled() or (is_again and self._uses):
            return
        tensors = [tensor for tensor in inputs if tensor.requires_grad]
        self.use = use = UnitUse(len(tensors), is_again)
        for tensor in tensors:
            on_gradient(tensor, lambda _: came(self.number, use))
        if is_again:  # reentrant checkpointing goes back through what is computed now
            self._uses[use] = use.num_inputs

    def reach(self, use: UnitUse) -> None:
        """Note that a backward pass goes through a call's output: what was computed again, was for it."""
        self._uses = {each: num for each, num in self._uses.items() if not each.is_again}
        self._uses[use] = use.num_inputs

    def take_input(self, use: UnitUse) -> bool:
        """Note the gradient of a call's input; return whether the backward pass is done with the unit."""
        if use in self._uses:
            self._uses[use] -= 1
            if not self._uses[use]:
                del self._uses[use]
                return self._end_if_done()
        return False

    def take_gradient(self, index: int) -> bool:
        """Note the gradient of one that it waits for; return whether the backward pass is done with it."""
        self._arrived.add(index)
        return self._end_if_done()

    def _end_if_done(self) -> bool:
        is_done = not self._uses and len(self._arrived) == len(self.waits_for)
        if is_done:
            self._arrived.clear()
        return is_done

    def end_pass(self) -> None:
        """Forget a backward pass."""
        self._arrived.clear()
        self._uses.clear()

    @property
    def params(self) -> list[Tensor]:
        """Its parameters, bucket by bucket."""
        return [param for bucket in self.buckets for param in bucket.params]

    @property
    def is_whole(self) -> bool:
        """Whether its parameters can be read."""
        return all(map(_IS_WHOLE, self.buckets))

    def arrive(self) -> None:
        """Wait, with the current stream, for the gathers that make it whole."""
        for bucket in self.buckets:
            bucket.values.arrive()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what is freed with the unit."""
        return any(bucket.values.shares_memory(tensor) for bucket in self.buckets)


class UnitTask(Task):
    """Gathers and frees units, for a purpose; if it ``tells`` of failures of the last step."""

    def __init__(self, units: Sequence[Unit], gathers: UnitGathers, purpose: Purpose, *, tells: bool) -> None:
        self._units, self._gathers, self._purpose, self._tells = units, gathers, purpose, tells
        self._is_here = False

    def to_gather(self, buckets: Sequence[Any]) -> Sequence[Any]:
        """Leave out what is whole or comes."""
        return list(filter(_NEEDS_GATHER, buckets))

    def gather(self, bucket: Bucket[Any]) -> Pending[None]:
        """Start the gather of a bucket."""
        return self._gathers.start(bucket, self._purpose, tells=self._tells)

    def clean_up(self, error: BaseException, buckets: Sequence[Any]) -> None:
        """If ranks gather different units, free these, and forget all gathers, which may never come."""
        self._is_here, differs = False, isinstance(error, RankMismatchError)
        if differs:
            for bucket in buckets_of(self._units):
                bucket.values.forget()
            self._gathers.abandon()
        # Copies in the owners' dtype go in any case: gathers and values would keep each other alive.
        for bucket in buckets if differs or self._purpose is Purpose.AS_KEPT else ():
            bucket.free()

    def start_awaited(self, bucket: Bucket[Any], at_once: int) -> None:
        """Start a gather, which the values keep: each stream that reads them waits for it."""
        bucket.values.keep(self.gather(bucket))

    def arrived(self, buckets: Sequence[Any]) -> None:
        """Wait for the gathers that values keep; RankMismatchError if a rank gathered another unit."""
        for bucket in buckets:
            bucket.values.arrive()
        self._gathers.stamps.check()
        self._is_here = True

    def end(self) -> None:
        """Compare the stamps that came."""
        is_here, self._is_here = self._is_here, False
        if self._tells and is_here:
            self._gathers.stamps.look()


class UnitOperations:
    """Gathers and frees the units of a model, those that nobody needs whole; communicates."""

    def __init__(
        self, units: Sequence[Unit], calls: Sequence[Call], unit_of: Mapping[nn.Module, Unit]
    ) -> None:
        self.units = units  # by number
        self.requested: list[Unit] = []  # that somebody needs whole, once for each request
        self._calls, self._unit_of = calls, unit_of  # those under way, and the units of their modules

    def use(self, engine: Engine, gathers: UnitGathers) -> None:
        """Gather for this optimizer from now on."""
        self._engine = engine
        self._tasks = {
            (purpose, tells): UnitTask(self.units, gathers, purpose, tells=tells)
            for purpose in Purpose
            for tells in (False, True)
        }

    def at(
        self,
        moment: Moment,
        buckets: Sequence[Any],
        purpose: Purpose = Purpose.TRAINING,  # of gathers
        *,
        tells: bool = False,
        only: Operation | None = None,
    ) -> None:
        """Run what a moment has for buckets."""
        if buckets:
            self._engine.on(moment, buckets, self._tasks[purpose, tells], only)

    def num_users(self, unit: Unit) -> int:
        """Count the requests, and the calls under way, that need a unit whole."""
        num = self.requested.count(unit)
        for call in self._calls:
            num += self._unit_of[call.module] is unit
        return num

    def free_unused(self, units: Iterable[Unit], moment: Moment = Moment.AFTER_MODULE) -> None:
        """Free those that nobody needs."""
        self.at(moment, [bucket for unit in units if not self.num_users(unit) for bucket in unit.buckets])


def buckets_of(units: Iterable[Unit]) -> list[Bucket[RowValues]]:
    """List the buckets of units."""
    return [bucket for unit in units for bucket in unit.buckets]


@dataclass(slots=True, eq=False)
class UnitValues:
    """The values of units, by parameter, for somebody to read or write."""

    values: dict[Tensor, Tensor]
    are_written: bool = False  # so that owners take them over

    def mark(self, *, written: bool) -> None:
        """Have owners take the values over at the end, or not."""
        self.are_written = written


class UnitOrder:
    """The order in which passes of one kind need units: in the one `before`, and `now`."""

    def __init__(self) -> None:
        self.before: list[Unit] = []
        self.now: list[Unit] = []
        self.is_under_way = False

    def begin(self) -> list[Unit]:
        """Begin a pass; return its order, which is `now` until it ends."""
        self.now, self.is_under_way = [], True
        return self.now

    def reached(self, unit: Unit) -> Unit | None:
        """Note that a unit is needed; return the one that came next in the pass before, if any."""
        here = len(self.now)
        self.now.append(unit)
        expected = self.before[here : here + 2]
        return expected[1] if len(expected) == 2 and expected[0] is unit else None

    def end(self, *, broke_off: bool = False) -> None:
        """End a pass; if an exception did, the former order holds."""
        if not broke_off:
            self.before = self.now
        self.now, self.is_under_way = [], False
