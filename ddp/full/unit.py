"""One unit, what the engine does to its buckets, and the order in which units are needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from zero_optim.errors import RankMismatchError
from zero_optim.flow.pending import Pending
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.row_bucket import RowBucket
from zero_optim.shard.task import Task

OUTERMOST = "the outermost unit"
_IS_WHOLE = attrgetter("is_whole")


@dataclass(frozen=True, slots=True, eq=False)
class UnitUse:
    """A call of a unit, for the backward pass through it; `is_again`: it computes activations again."""

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
    holds: int = 0  # users that need it whole, beside calls
    passage: UnitUse | None = None  # of its call under way, if that waits for its inputs' gradients
    arrived: set[int] = field(default_factory=set)  # parameters with a gradient in this backward pass
    # Calls whose outputs this backward pass has reached, each with how many of its inputs still lack their
    # gradients; 0 if none has one: then the unit stays whole until the end of the pass.
    passages: dict[UnitUse, int] = field(default_factory=dict)

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
            bucket.arrive()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what is freed with the unit."""
        return any(bucket.shares_memory(tensor) for bucket in self.buckets)


class UnitTask(Task):
    """Gathers and frees units, for a purpose; if it ``tells`` of failures of the last step."""

    def __init__(self, units: Sequence[Unit], gathers: UnitGathers, purpose: Purpose, *, tells: bool) -> None:
        self._units, self._gathers, self._purpose, self._tells = units, gathers, purpose, tells
        self._is_here = False

    def to_gather(self, buckets: Sequence[Any]) -> Sequence[Any]:
        """Leave out what is whole or comes."""
        return [bucket for bucket in buckets if bucket.needs_gather]

    def gather(self, bucket: Bucket) -> Pending[None]:
        """Start the gather of a bucket."""
        return self._gathers.start(bucket, self._purpose, tells=self._tells)

    def clean_up(self, error: BaseException, buckets: Sequence[Any]) -> None:
        """If ranks gather different units, free these, and forget all gathers, which may never come."""
        if isinstance(error, RankMismatchError):
            for unit in self._units:
                for bucket in unit.buckets:
                    bucket.gathers.abandon()
            self._gathers.abandon()
            for each in buckets:
                each.free()

    def arrived(self) -> None:
        """Raise RankMismatchError if a rank gathered another unit."""
        self._gathers.stamps.check()
        self._is_here = True

    def end(self) -> None:
        """Compare the stamps that came."""
        if self._tells and self._is_here:
            self._gathers.stamps.look()


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
        self.before: list[int] = []
        self.now: list[int] = []
        self.is_under_way = False

    def begin(self) -> list[int]:
        """Begin a pass; return its order, which is `now` until it ends."""
        self.now, self.is_under_way = [], True
        return self.now

    def reached(self, number: int) -> int | None:
        """Note that a unit is needed; return the one that came next in the pass before."""
        place = len(self.now)
        self.now.append(number)
        if self.before[place : place + 1] == [number] and place + 1 < len(self.before):
            return self.before[place + 1]
        return None

    def end(self, *, broke_off: bool = False) -> None:
        """End a pass; if an exception did, the former order holds."""
        if not broke_off:
            self.before = self.now
        self.now, self.is_under_way = [], False
