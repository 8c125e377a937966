"""One unit: its parameters, and how far it is in use. Nothing here communicates."""

from dataclasses import dataclass, field

from torch import Tensor

from zero_optim.shard.units import UnitBucket

OUTERMOST = "the outermost unit"


@dataclass(slots=True, eq=False)
class Unit:
    """The parameters of a unit.

    Attributes:
        number: among all units; 0 is the outermost.
        name: of its module.
        buckets: one for each dtype, and for frozen parameters.
        waits_for: indices of the parameters whose gradients must be there before it is freed in a backward
            pass; none if some parameter is frozen, as nobody knows when that was used last.
        depth: how many calls of its modules are under way.
        arrived: indices of the parameters whose gradients have come in this backward pass.
    """

    number: int
    name: str
    buckets: list[UnitBucket]
    waits_for: frozenset[int]
    depth: int = 0
    arrived: set[int] = field(default_factory=set)

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

    def arrive(self) -> None:
        """Wait, with the current stream, for the gathers that make it whole."""
        for bucket in self.buckets:
            bucket.arrive()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what is freed with the unit."""
        return any(bucket.shares_memory(tensor) for bucket in self.buckets)

    @property
    def is_whole(self) -> bool:
        """Whether its parameters can be read."""
        return all(bucket.is_whole for bucket in self.buckets)
