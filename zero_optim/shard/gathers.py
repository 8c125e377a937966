"""Gathers: the owners broadcast their rows of each bucket to all ranks.

All functions that take a group or lanes communicate, and all ranks call them in the same order of buckets.

Note [A lane an owner]
    A gloo group matches operations by the order in which they were issued, and runs few at a time. So
    broadcasts of several owners on one group are half duplex for much of the time. With a group for each
    owner each link is used in both directions: a gather of 55 MB between two ranks takes 240 ms over 1 Gbit/s
    in the place of 390 to 440, of which the wire alone needs 233; over loopback 0.8 to 0.9 of the time.

    Process groups take threads and file descriptors. Below 1 MiB in all, two ranks gain nothing (measured:
    0.9 to 1.3 of the time). So lanes are taken by the first gather that is larger and has several owners.
    Sizes and owners are planned, so the ranks decide alike. The lanes are not those of an overlapped step,
    whose thread gathers in an order of its own.

    Other backends have one communicator for all traffic of a device. There the broadcasts of a bucket are one
    launch however many owners it has: Note [Rows at once] in `zero_optim.comm.collectives`.

Note [Small buckets]
    A few parameters of another dtype are a bucket of their own, with a broadcast for each owner. To send the
    small rows of one owner as one message gains nothing: beside 55 MB, one such bucket or four take the
    same 230 to 240 ms over 1 Gbit/s. What did cost time was a limit on the number of gathers under way.
    With four small buckets between two large ones the second large one had to wait, and a gather took 300 ms.
    So the limit is one of memory, and where parameters are views of their bucket there is none.

Note [Step, then gather]
    Ordinary steps step everything, then gather everything. To step one bucket, start its gather, and step the
    next, was tried on gloo: the same bits for most classes, and too little gain. Time of a step with it, as a
    factor (AdamW, 13.8 M parameters, two ranks, buckets of 32 MiB / 8 MiB)::

        AdamW's options    link of 1 Gbit/s    loopback, two cores
        fused              1.00 / 1.01         1.02 / 1.04
        foreach=False      0.99 / 0.99         1.03 / 1.14
        foreach=True       0.97 / 0.93         0.74 / 0.87

    A fused step is 9 of 240 ms, so there is little to hide. The rank that has a long row in the first bucket
    starts late all the same. Over loopback, the step and gloo's threads share the cores. What ``foreach``
    gains is mostly in its own step, as its temporaries then fit the cache.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeAlias

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, gloo_lanes_beside
from zero_optim.comm.started import Pending
from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import is_asynchronous
from zero_optim.health.stamps import Stamps
from zero_optim.plan.layout import Layout, Span
from zero_optim.shard.storage import ParamBucket, rows_of

# Flat tensors of gathers under way take no more memory than so many of the largest bucket.
NUM_FLAT_TENSORS = 4
# See Note [A lane an owner].
LANES_FROM_NBYTES = 2**20


class UnderWay:
    """Gathers that were started and may not have ended, each with the parameters that it brings.

    Each stream that reads parameters waits for them. So a gather is kept, on an accelerator, until it is
    known to be over: a second stream may come for a parameter that the first one has waited for.

    Two threads may use it at the same time. One steps buckets during the backward pass and starts their
    gathers. Meanwhile that pass may run a forward pass again (checkpointing), which waits for parameters.
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
        """Wait for none of them any more: the backend lets go of what they use when it has done with it."""
        with self._lock:
            self._gathers.clear()
            self._awaited.clear()

    def _forget_all_but(self, left: Iterable[Pending]) -> None:
        """Let go of the others, which are over: else each parameter would keep one for every step."""
        kept = {id(pending) for pending in left}
        awaited = self._awaited.items() if kept else ()
        of_params = ((param, [one for one in some if id(one) in kept]) for param, some in awaited)
        self._awaited = {param: some for param, some in of_params if some}


class _Sender(Protocol):
    """What sends stamps with a gather."""

    def send(
        self, flat: Tensor, layout: Layout, rank: int, chosen: Collection[int] | None = None
    ) -> Callable[[], None]:
        """See `Stamps.send`."""
        ...


# As `start_broadcasts`.
StartRows: TypeAlias = Callable[[Sequence[RankGroup], Sequence[tuple[int, Tensor]], str], list[Waitable]]


def start_gather(
    lanes: Sequence[RankGroup],
    bucket: ParamBucket,
    stamps: _Sender | None = None,
    start_rows: StartRows | None = None,
) -> Pending:
    """Start the gather of one bucket; all ranks call, in the same order of buckets.

    One broadcast for each owner that has a row in the bucket; one launch for all of them where the backend
    has such a thing.

    Args:
        lanes: groups of the same ranks, see `start_gather_of_part`.
        bucket: the bucket.
        stamps: sent with it, None for none.
        start_rows: starts to send the rows; None for `start_broadcasts`.

    Returns:
        The gather. Parameters of other owners have their new values after ``wait()``, on an accelerator for
        work of the stream that waited. Until then nothing may write to any parameter of the bucket.
    """
    flat = bucket.fill()
    take = None if stamps is None else stamps.send(flat, bucket.layout, lanes[0].rank)
    rows = rows_of(flat, bucket.layout)
    return gather_into(flat, bucket, lanes, rows, take, start_rows=start_rows)


def start_gather_of_part(
    lanes: Sequence[RankGroup],
    bucket: ParamBucket,
    chosen: Collection[int],
    spans: Sequence[Span],
    stamps: Stamps | None = None,
) -> Pending:
    """Start the gather of some parameters of a bucket; all ranks call, in the same order.

    Args:
        lanes: groups of the same ranks. Owner r sends on lane r modulo their number: one gloo group is not
            reliably full duplex, several are.
        bucket: the bucket.
        chosen: indices of the parameters within the bucket.
        spans: where they lie.
        stamps: sent with them, None for none.
    """
    flat = bucket.fill(chosen)
    take = None if stamps is None else stamps.send(flat, bucket.layout, lanes[0].rank, chosen)
    rows = [(span.owner, flat[span.start : span.stop]) for span in spans]
    return gather_into(flat, bucket, lanes, rows, take, chosen)


def gather_into(
    flat: Tensor,
    bucket: ParamBucket,
    lanes: Sequence[RankGroup],
    rows: Sequence[tuple[int, Tensor]],
    take: Callable[[], None] | None,
    chosen: Collection[int] | None = None,
    *,
    start_rows: StartRows | None = None,
) -> Pending:
    """Start to send the rows that fill a flat tensor, which the bucket takes over when they have come.

    Args:
        flat: as `ParamBucket.fill` gives it.
        bucket: the bucket.
        lanes: groups of the same ranks, see `start_gather_of_part`.
        rows: parts of the flat tensor, each with the rank of a lane that sends it.
        take: reads the stamps that came; None for none.
        chosen: indices of the parameters within the bucket; None for all.
        start_rows: see `start_gather`.
    """
    works = (start_rows or start_broadcasts)(lanes, rows, bucket.label)
    return Pending(works, [flat], partial(_end, bucket, flat, chosen, take))


def _end(
    bucket: ParamBucket, flat: Tensor, chosen: Collection[int] | None, take: Callable[[], None] | None
) -> None:
    bucket.settle(flat, chosen)
    if take is not None:
        take()


def start_broadcasts(
    lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
) -> list[Waitable]:
    """Have each rank send its rows, on the lane that is its own; all ranks call.

    Args:
        lanes: groups of the same ranks, see `start_gather_of_part`.
        rows: what is sent, or received in place, each with the rank of a lane that sends it.
        label: names it in messages.
    """
    works: list[Waitable] = []
    for number, lane in enumerate(lanes):
        works += lane.broadcast_rows([row for row in rows if row[0] % len(lanes) == number], label)
    return works


class Gathers:
    """The gathers of one optimizer after its ordinary steps, and what may still be under way of any.

    Attributes:
        under_way: gathers that were started and may not have ended, those of overlapped steps too.
        readers: sets of parameters. A step leaves their gathers under way, because the code that reads them
            waits.
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
        """Wait for the gathers under way, and let the lanes go; does not communicate.

        What a rank that has died did not send is given up: no error.

        Args:
            waits: False abandons the gathers at once.
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
        """Start the gathers of buckets in a step, and wait for none; all ranks call."""
        with self._lent(group, buckets) as lanes:
            for bucket in buckets:
                lanes_of = _lanes_for(bucket, group, lanes)
                self.under_way.add(bucket.params, start_gather(lanes_of, bucket, self.stamps))

    def run(self, group: RankGroup, buckets: Sequence[ParamBucket], *, in_step: bool = False) -> None:
        """Gather buckets, and wait for all; all ranks call. In a group of one it does not communicate.

        As many as memory allows are under way at once. Otherwise an owner with little in the first buckets
        would wait for those with much, as each owner sends for itself.

        Args:
            group: the ranks.
            buckets: the buckets.
            in_step: send the stamps too.
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
        """Give the lanes, if there are any; where the body fails, nobody else gets them."""
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
