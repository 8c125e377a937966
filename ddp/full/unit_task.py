"""What the engine does to the buckets of units."""

from collections.abc import Sequence
from typing import Any, Protocol

from zero_optim.errors import RankMismatchError
from zero_optim.flow.pending import Pending
from zero_optim.health.unit_stamps import Purpose
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.task import Task


class UnitOwner(Protocol):
    """Who has the units: `UnitsInUse`."""

    gathers: UnitGathers

    def forget_gathers(self) -> None:
        """Forget all gathers, which may never come."""


class UnitTask(Task):
    """Gathers and frees units, for a purpose; if it ``tells`` of failures of the last step."""

    def __init__(self, units: UnitOwner, purpose: Purpose, *, tells: bool) -> None:
        self._units, self._purpose, self._tells = units, purpose, tells
        self._is_here = False

    def to_gather(self, buckets: Sequence[Any]) -> Sequence[Any]:
        """Leave out what is whole or comes."""
        return [bucket for bucket in buckets if bucket.needs_gather]

    def gather(self, bucket: Bucket) -> Pending[None]:
        """Start the gather of a bucket."""
        return self._units.gathers.start(bucket, self._purpose, tells=self._tells)

    def clean_up(self, error: BaseException, buckets: Sequence[Any]) -> None:
        """If ranks gather different units, free these, and forget other gathers."""
        if isinstance(error, RankMismatchError):
            self._units.forget_gathers()
            for bucket in buckets:
                bucket.free()

    def arrived(self) -> None:
        """Raise RankMismatchError if a rank gathered another unit."""
        self._units.gathers.stamps.check()
        self._is_here = True

    def end(self) -> None:
        """Compare the stamps that came."""
        if self._tells and self._is_here:
            self._units.gathers.stamps.look()
