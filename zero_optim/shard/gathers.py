"""Gathers: the owners broadcast their rows of each bucket to all ranks.

All functions that take a group or lanes communicate, and all ranks call them in the same order of buckets.

Note [A lane an owner]
    A gloo group runs its operations in the order in which they were issued, few at a time, so broadcasts of
    several owners on one group are half duplex for much of the time. With a group for each owner a gather
    of 55 MB between two ranks takes 240 ms over 1 Gbit/s instead of 390 to 440 (the wire alone needs 233),
    and 0.8 to 0.9 of the time over loopback. Below 1 MiB in all nothing is gained, and groups take threads
    and file descriptors. So the first gather that is larger and has several owners takes lanes; all ranks
    decide alike, by the plan. An overlapped step has lanes of its own, as its thread gathers in another
    order. Other backends have one communicator for all traffic of a device: Note [Rows at once] in
    `zero_optim.comm.collectives`.

Note [Small buckets]
    To send small rows of one owner as one message gains nothing. What cost time was a limit on the *number*
    of gathers under way: with four small buckets between two large ones a gather took 300 ms instead of
    240. So the limit is one of memory, and where parameters are views of their bucket there is none.

Note [Step, then gather]
    Ordinary steps step everything, then gather everything. To gather one bucket while the next is stepped
    gained nothing for fused steps (1.00 to 1.04 of the time over 1 Gbit/s and loopback, AdamW, 13.8 M
    parameters): the step is 9 of 240 ms, and the rank with a long row in the first bucket starts late all
    the same.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, gloo_lanes_beside
from zero_optim.comm.started import Pending
from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import is_asynchronous
from zero_optim.health.stamps import Stamps
from zero_optim.plan.layout import Layout
from zero_optim.shard.storage import ParamBucket, rows_of

# Flat tensors of gathers under way take no more memory than so many of the largest bucket.
NUM_FLAT_TENSORS = 4
# See Note [A lane an owner].
LANES_FROM_NBYTES = 2**20


class UnderWay:
    """Gathers that were started and may not have ended, by the parameters that they bring.

    On an accelerator a gather is kept until it is known to be over, as each stream that reads parameters
    has to wait for it. Two threads may use this at once: one steps buckets during the backward pass, which
    meanwhile may run a forward pass again (checkpointing) that waits for parameters.
    """

    def __init__(self) -> None:
        self._gathers: deque[Pending] = deque()
        self._awaited: dict[Tensor, list[Pending]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> "tuple[type[UnderWay], tuple[()]]":
        """Copy and pickle without the gathers: they write to the parameters that they were started for."""
        return UnderWay, ()

    def __bool__(self) -> bool:
        return bool(self._gathers)

    @property
    def is_unclaimed(self) -> bool:
        """Whether there is a gather that nobody has waited for yet."""
        return any(pending.is_unclaimed for pending in self._gathers)

    def add(self, params: Iterable[Tensor], pending: Pending) -> None:
        """Add a gather that was started."""
        with self._lock:
            self._gathers.append(pending)
            for param in params:
                self._awaited.setdefault(param, []).append(pending)

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Wait, with the current stream, until some parameters have their new values."""
        with self._lock:
            for param in params:
                left = [pending for pending in self._awaited.pop(param, ()) if not pending.wait()]
                if left:
                    self._awaited[param] = left
            if not self._awaited:
                self._gathers.clear()

    def wait(self) -> None:
        """Wait for all gathers, in the order in which they were started, with the current stream."""
        with self._lock:
            left: deque[Pending] = deque()
            num_over = 0
            while self._gathers:
                pending = self._gathers.popleft()
                if pending.wait():
                    num_over += 1
                else:
                    left.append(pending)
            self._gathers = left
            if num_over:
                self._forget_all_but(left)

    def abandon(self) -> None:
        """Drop all of them: the backend keeps what they use until it has done with it."""
        with self._lock:
            self._gathers.clear()
            self._awaited.clear()

    def _forget_all_but(self, left: Iterable[Pending]) -> None:
        """Drop the others, which are over: else each parameter would keep one for every step."""
        ids = {id(pending) for pending in left}
        awaited = self._awaited.items() if ids else ()
        of_params = ((param, [one for one in some if id(one) in ids]) for param, some in awaited)
        self._awaited = {param: some for param, some in of_params if some}


class _Sender(Protocol):
    """Sends stamps with a gather, as `Stamps.send`."""

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]: ...


# As `start_broadcasts`.
StartRows: TypeAlias = Callable[[Sequence[RankGroup], Sequence[tuple[int, Tensor]], str], list[Waitable]]


def start_gather(
    lanes: Sequence[RankGroup],
    bucket: ParamBucket,
    stamps: _Sender | None = None,
    start_rows: StartRows | None = None,
) -> Pending:
    """Start the gather of one bucket: a broadcast for each owner, in one launch where the backend can.

    Args:
        lanes: groups of the same ranks. Owner r sends on lane r modulo their number: one gloo group is not
            reliably full duplex, several are.
        bucket: the bucket.
        stamps: sent with it, None for none.
        start_rows: starts to send the rows; None for `start_broadcasts`.

    Returns:
        The gather. After its ``wait()`` the parameters have their new values, on an accelerator for the
        stream that waited. Until then nothing may write to a parameter of the bucket.
    """
    flat = bucket.fill()
    take = None if stamps is None else stamps.send(flat, bucket.layout, lanes[0].rank)
    rows = rows_of(flat, bucket.layout)
    return gather_into(flat, bucket, lanes, rows, take, start_rows=start_rows)


def gather_into(
    flat: Tensor,
    bucket: ParamBucket,
    lanes: Sequence[RankGroup],
    rows: Sequence[tuple[int, Tensor]],
    take: Callable[[], None] | None,
    *,
    start_rows: StartRows | None = None,
) -> Pending:
    """Start the broadcasts of rows that fill a flat tensor, which the bucket takes over when they have come.

    Args:
        flat: as `ParamBucket.fill` returns it.
        bucket: the bucket.
        lanes: see `start_gather`.
        rows: parts of the flat tensor, each with the rank of a lane that sends it.
        take: reads the stamps that came; None for none.
        start_rows: see `start_gather`.
    """
    works = (start_rows or start_broadcasts)(lanes, rows, bucket.label)

    def end() -> None:
        bucket.settle(flat)
        if take is not None:
            take()

    return Pending(works, [flat], end)


def start_broadcasts(
    lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
) -> list[Waitable]:
    """Broadcast rows, each from its rank on the lane of that rank; arguments as in `gather_into`."""
    works: list[Waitable] = []
    for number, lane in enumerate(lanes):
        works += lane.broadcast_rows([row for row in rows if row[0] % len(lanes) == number], label)
    return works


class Gathers:
    """The gathers of one optimizer.

    Attributes:
        under_way: gathers that were started and may not have ended, those of overlapped steps too.
        readers: sets of parameters whose gathers a step leaves under way, as modules wait for them.
        stamps: what ranks tell each other in the gathers of a step; None in a group of one.
    """

    def __init__(self, stamps: Stamps | None = None) -> None:
        self.under_way = UnderWay()
        self.stamps = stamps
        self.readers: list[frozenset[Tensor]] = []
        self._lanes: Lease | None = None  # for owners, see Note [A lane an owner]; the same on every rank

    def __reduce__(self) -> "tuple[type[Gathers], tuple[Stamps | None]]":
        """Copy and pickle as new: readers wait for this object's gathers; a copy takes lanes of its own."""
        return Gathers, (self.stamps,)

    def let_go(self, *, waits: bool) -> None:
        """Wait for the gathers under way, or abandon them, and let the lanes go.

        No error where a rank has died, and did not send.
        """
        lanes, self._lanes = self._lanes, None
        try:
            if waits:
                self.under_way.wait()
        except RuntimeError:  # of the backend
            if lanes is not None:
                lanes.abandon()
        finally:
            self.under_way.abandon()

    def check_failures(self) -> None:
        """Raise if a rank is known to have failed in the last call; see `Stamps.check_failures`."""
        if self.stamps is not None:
            self.stamps.check_failures()

    def start(self, group: RankGroup, buckets: Sequence[ParamBucket]) -> None:
        """Start the gathers of buckets in a step, and wait for none."""
        with self._lent(group, buckets) as lanes:
            for bucket in buckets:
                lanes_of = _lanes_for(bucket, group, lanes)
                self.under_way.add(bucket.params, start_gather(lanes_of, bucket, self.stamps))

    def run(self, group: RankGroup, buckets: Sequence[ParamBucket], *, in_step: bool = False) -> None:
        """Gather buckets, and wait for all; ``in_step`` sends the stamps too.

        As many as memory allows are under way at once: an owner with little in the first buckets need not
        wait for those with much.
        """
        stamps = self.stamps if in_step else None
        under_way: deque[tuple[int, Pending]] = deque()
        room = NUM_FLAT_TENSORS * max((bucket.nbytes_to_gather for bucket in buckets), default=0)
        with self._lent(group, buckets) as lanes:
            for bucket in buckets:
                room -= bucket.nbytes_to_gather
                while room < 0:
                    nbytes, pending = under_way.popleft()
                    pending.wait()
                    room += nbytes
                pending = start_gather(_lanes_for(bucket, group, lanes), bucket, stamps)
                under_way.append((bucket.nbytes_to_gather, pending))
            for _, pending in under_way:
                pending.wait()

    @contextmanager
    def _lent(self, group: RankGroup, buckets: Sequence[ParamBucket]) -> Iterator[Sequence[RankGroup]]:
        """Yield the lanes, if there are any; where the body fails, nobody else gets them."""
        if self._lanes is None and _gains_by_lanes(group, buckets):
            self._lanes = gloo_lanes_beside(group)
        lanes = self._lanes
        try:
            yield () if lanes is None else lanes.groups
        except BaseException:
            if lanes is not None:
                lanes.abandon()
            raise


def _gains_by_lanes(group: RankGroup, buckets: Sequence[ParamBucket]) -> bool:
    """Whether the gather of some buckets is quicker on lanes; the same on every rank."""
    sent = [bucket for bucket in buckets if _may_use_lanes(bucket, group)]
    if group.size == 1 or sum(bucket.nbytes for bucket in sent) < LANES_FROM_NBYTES:
        return False
    return len({row.owner for bucket in sent for row in bucket.layout.rows}) > 1


def _may_use_lanes(bucket: ParamBucket, group: RankGroup) -> bool:
    return not is_asynchronous(bucket.device) and group.backend_of(bucket.device) == "gloo"


def _lanes_for(bucket: ParamBucket, group: RankGroup, lanes: Sequence[RankGroup]) -> Sequence[RankGroup]:
    return lanes if lanes and _may_use_lanes(bucket, group) else (group,)
