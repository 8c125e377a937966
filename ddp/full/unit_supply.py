"""Makes units whole and frees them, for whoever knows when. What knows it is `zero_optim.ddp.full.units`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.started import Pending
from zero_optim.ddp.full.unit import Unit
from zero_optim.errors import RankMismatchError
from zero_optim.health.unit_marks import Purpose
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.shard.storage import ParamBucket
from zero_optim.shard.unit_gathers import UnitGathers


class UnitSupply:
    """The gathers of some units. All ranks make the same calls, in the same order.

    `start`, `start_gather_of`, `fetch` and `need` communicate.

    Args:
        units: by number.
        group: the ranks.
        gathers: starts the gathers.
        stamps: what the gathers of forward passes tell of steps.

    Attributes:
        units, group, gathers, stamps: as given, or as of `use`.
    """

    def __init__(
        self, units: Sequence[Unit], group: RankGroup, gathers: UnitGathers, stamps: UnitStamps
    ) -> None:
        self.units = units
        self.use(group, gathers, stamps)

    def use(self, group: RankGroup, gathers: UnitGathers, stamps: UnitStamps) -> None:
        """Gather for another optimizer from now on, with the same ranks, which counts what is sent.

        Args:
            group: the ranks.
            gathers: starts the gathers.
            stamps: those of the other optimizer.
        """
        self.group, self.gathers, self.stamps = group, gathers, stamps

    def start(self, unit: Unit, purpose: Purpose, *, tells: bool = False) -> None:
        """Start the gather of a unit, unless it is whole, or on its way.

        Args:
            unit: the unit.
            purpose: what it is gathered for.
            tells: its gather tells what other ranks did differently, see `zero_optim.health.unit_stamps`.
        """
        stamps = self.stamps if tells else None
        for bucket in unit.buckets:
            if not bucket.is_whole and bucket.coming is None:
                bucket.coming = self.gathers.start(bucket, stamps, purpose)

    def start_gather_of(self, bucket: ParamBucket) -> Pending:
        """Start the gather of what owners keep of a bucket, which somebody has asked for."""
        return self.gathers.start(bucket, purpose=Purpose.AS_KEPT)

    def fetch(self, number: int | None, purpose: Purpose, *, tells: bool = False) -> None:
        """Start the gather of the unit that comes next, if it is known; see `start`."""
        if number is not None:
            self.start(self.units[number], purpose, tells=tells)

    def need(self, unit: Unit, purpose: Purpose, *, tells: bool = False) -> None:
        """Make a unit whole; the current stream, on the CPU the caller, waits. See `start`.

        Raises:
            RankMismatchError: another rank has gathered something else. The unit is freed.
        """
        self.start(unit, purpose, tells=tells)
        with self._forgetting(unit):
            unit.arrive()
            self.gathers.check()
        if tells:
            self.stamps.look()

    @contextmanager
    def _forgetting(self, unit: Unit) -> Iterator[None]:
        """Free a unit where ranks gather different parts, and forget all others: they may never come."""
        try:
            yield
        except RankMismatchError:
            for bucket in (bucket for each in self.units for bucket in each.buckets):
                bucket.coming = None
            self.gathers.abandon()
            self.free(unit)
            raise

    def free(self, unit: Unit) -> None:
        """Free a unit, except what somebody has pinned."""
        with self._forgetting(unit):
            for bucket in unit.buckets:
                bucket.free()

    def free_fetched(self) -> None:
        """Free what was fetched and not needed."""
        for unit in self.units:
            if any(bucket.coming is not None for bucket in unit.buckets):
                self.free(unit)

    def free_unused(self, units: Iterable[Unit] | None = None) -> None:
        """Free those of some units that no call is using; None for all."""
        for unit in self.units if units is None else units:
            if not unit.depth:
                self.free(unit)

    def pin(self, unit: Unit, more: int) -> None:
        """Count one more, or one fewer, that needs a unit whole."""
        unit.depth += more
        for bucket in unit.buckets:
            bucket.num_pins += more

    def check_unpinned(self) -> None:
        """Refuse what is not possible while somebody needs parameters of any unit whole.

        Raises:
            RuntimeError: somebody does.
        """
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.check_unpinned()

    @contextmanager
    def left_freed(self) -> Iterator[None]:
        """Have state dicts show the parameters as they are; does not communicate."""
        buckets = [bucket for unit in self.units for bucket in unit.buckets]
        for bucket in buckets:
            bucket.is_left = True
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.is_left = False
