"""One unit, the order in which units are needed, and what gathers and frees them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.errors import RankMismatchError
from zero_optim.health.unit_stamps import Purpose, UnitStamps
from zero_optim.shard.row_bucket import RowBucket, WideBucket
from zero_optim.shard.row_gathers import UnitGathers

OUTERMOST = "the outermost unit"


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A call of a unit, as a backward pass goes through it; `is_again`: it computes activations again."""

    num_inputs: int  # that require a gradient
    is_again: bool


@dataclass(slots=True, eq=False)
class Unit:
    """The parameters of a unit, and how far it is in use."""

    number: int  # 0 is the outermost
    name: str
    buckets: list[RowBucket]
    # Parameters, by index, whose gradients must be there before it is freed in a backward pass: its own that
    # are trained; where some are frozen, also those of units inside it.
    waits_for: frozenset[int]
    has_frozen: bool  # so it also waits for the gradients of its inputs
    depth: int = 0  # calls and users under way
    arrived: set[int] = field(default_factory=set)  # parameters with a gradient in this backward pass
    # Calls whose outputs this backward pass has reached, each with how many of its inputs still lack their
    # gradients; 0 if none has one: then the unit stays whole until the end of the pass.
    passages: dict[Passage, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the backward pass under way needs it no more."""
        return not self.passages and self.arrived >= self.waits_for

    @property
    def params(self) -> list[Tensor]:
        """Its parameters, bucket by bucket."""
        return [param for bucket in self.buckets for param in bucket.params]

    @property
    def is_rounded(self) -> bool:
        """Whether owners keep some of its parameters in another dtype than these have."""
        return any(bucket.is_rounded for bucket in self.buckets)

    @property
    def is_left(self) -> bool:
        """Whether state dicts are to show its parameters as they are."""
        return any(bucket.is_left for bucket in self.buckets)

    @property
    def is_whole(self) -> bool:
        """Whether its parameters can be read."""
        return all(bucket.is_whole for bucket in self.buckets)

    def forget_pass(self) -> None:
        """Forget what has come in a backward pass."""
        self.arrived.clear()
        self.passages.clear()

    def arrive(self) -> None:
        """Wait, with the current stream, for the gathers that make it whole."""
        for bucket in self.buckets:
            bucket.arrive()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what is freed with the unit."""
        return any(bucket.shares_memory(tensor) for bucket in self.buckets)

    def take_written(self) -> None:
        """Have owners take over what was written to the whole parameters."""
        for bucket in self.buckets:
            bucket.take_written()


class UnitOrder:
    """The order in which passes of one kind need units: `before`, and in the one under way."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self._now: list[int] = []
        self.is_under_way = False

    def begin(self) -> None:
        """Begin a pass."""
        self._now.clear()
        self.is_under_way = True

    def reached(self, number: int) -> int | None:
        """Note that a unit is needed; return the one that came next in the pass before."""
        place = len(self._now)
        self._now.append(number)
        if self.before[place : place + 1] == [number] and place + 1 < len(self.before):
            return self.before[place + 1]
        return None

    def end(self, *, broke_off: bool = False) -> None:
        """End a pass; where an exception did, the order of the one before holds."""
        if not broke_off:
            self.before = self._now
        self._now, self.is_under_way = [], False


class UnitSupply:
    """Gathers and frees units. All ranks make the same calls, in the same order."""

    def __init__(
        self, units: Sequence[Unit], group: RankGroup, gathers: UnitGathers, stamps: UnitStamps
    ) -> None:
        self.units = units
        self.use(group, gathers, stamps)

    def use(self, group: RankGroup, gathers: UnitGathers, stamps: UnitStamps) -> None:
        """Gather for another optimizer from now on, with the same ranks."""
        self.group, self.gathers, self.stamps = group, gathers, stamps

    @property
    def buckets(self) -> list[RowBucket]:
        """Those of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def start(self, unit: Unit, purpose: Purpose, *, tells: bool = False) -> None:
        """Start the gather of a unit that is not whole; with stamps if it `tells` of steps."""
        stamps = self.stamps if tells else None
        for bucket in unit.buckets:
            if not bucket.is_whole and not bucket.gathers.is_unclaimed:
                bucket.gathers.start(partial(self.gathers.start, bucket, stamps, purpose))

    def fetch(self, number: int | None, purpose: Purpose, *, tells: bool = False) -> None:
        """Start the gather of the unit that comes next, if it is known."""
        if number is not None:
            self.start(self.units[number], purpose, tells=tells)

    def need(self, unit: Unit, purpose: Purpose, *, tells: bool = False) -> None:
        """Make a unit whole and wait; RankMismatchError, and it is freed, if a rank gathered another."""
        self.start(unit, purpose, tells=tells)
        with self._forgetting(unit):
            unit.arrive()
            self.gathers.check()
        if tells:
            self.stamps.look()

    def gather_as_kept(self, unit: Unit) -> list[WideBucket]:
        """Gather a unit as its owners keep it, beside the parameters; RuntimeError if somebody needs them."""
        self.check_unpinned()  # of all, so that a walk over modules raises before it has changed anything
        wide = [WideBucket(bucket) for bucket in unit.buckets]
        for pending in [self.gathers.start(bucket, None, Purpose.AS_KEPT) for bucket in wide]:
            pending.wait()
        return wide

    @contextmanager
    def _forgetting(self, unit: Unit) -> Iterator[None]:
        """Where ranks gather different parts, free a unit and forget other gathers: they may never come."""
        try:
            yield
        except RankMismatchError:
            for bucket in self.buckets:
                bucket.gathers.abandon()
            self.gathers.abandon()
            self.free(unit)
            raise

    def free(self, unit: Unit) -> None:
        """Free a unit."""
        with self._forgetting(unit):
            for bucket in unit.buckets:
                bucket.free()

    def free_fetched(self) -> None:
        """Free what was fetched and not needed."""
        for unit in self.units:
            if any(bucket.gathers.is_unclaimed for bucket in unit.buckets):
                self.free(unit)

    def free_unused(self, units: Iterable[Unit] | None = None) -> None:
        """Free those of some units, by default of all, that nobody is using."""
        for unit in self.units if units is None else units:
            if not unit.depth:
                self.free(unit)

    def pin(self, unit: Unit, more: int) -> None:
        """Count one more, or one fewer, that needs a unit whole."""
        unit.depth += more
        for bucket in unit.buckets:
            bucket.num_pins += more

    def check_unpinned(self) -> None:
        """Raise RuntimeError if somebody needs parameters of any unit whole."""
        for bucket in self.buckets:
            bucket.check_unpinned()
