"""One unit, and the order in which units are needed. Does not communicate."""

from dataclasses import dataclass, field

from torch import Tensor

from zero_optim.shard.row_bucket import RowBucket

OUTERMOST = "the outermost unit"


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
    passage: UnitUse | None = (
        None  # its call's, where one is under way, if it waits for its inputs' gradients
    )
    arrived: set[int] = field(default_factory=set)  # parameters with a gradient in this backward pass
    # Calls whose outputs this backward pass has reached, each with how many of its inputs still lack their
    # gradients; 0 if none has one: then the unit stays whole until the end of the pass.
    passages: dict[UnitUse, int] = field(default_factory=dict)

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
        """Whether owners keep some of its parameters in another dtype."""
        return any(bucket.is_rounded for bucket in self.buckets)

    @property
    def is_whole(self) -> bool:
        """Whether its parameters can be read."""
        return all(bucket.is_whole for bucket in self.buckets)

    def arrive(self) -> None:
        """Wait, with the current stream, for the gathers that make it whole."""
        for bucket in self.buckets:
            bucket.arrive()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what is freed with the unit."""
        return any(bucket.shares_memory(tensor) for bucket in self.buckets)


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
