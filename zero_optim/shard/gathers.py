"""Gathers: the owners broadcast their rows of each bucket to all ranks.

Functions that take a group or lanes communicate; all ranks call them in the same order of buckets.

Note [A lane an owner]
    A gloo group runs operations in order, few at a time, so several owners' broadcasts are often half duplex.
    With a lane (a group) for each owner, a 55 MB gather between two ranks takes 240 ms over 1 Gbit/s instead
    of 390 to 440 (the wire alone: 233), and 0.8 to 0.9 of the time over loopback. Below 1 MiB lanes only cost
    threads and file descriptors; the first larger gather of several owners creates them. An overlapped step
    has its own, as its thread gathers in another order. Other backends have one communicator a device: Note
    [Rows at once] in `zero_optim.comm.collectives`.

Note [Small buckets]
    Merging an owner's small rows gained nothing. Limiting the *number* of pending gathers cost time (300
    instead of 240 ms with four small buckets between two large ones), so only memory is limited.

Note [Step, then gather]
    Gathering a bucket while stepping the next gained nothing for fused steps (1.00 to 1.04 of the time,
    AdamW, 13.8 M parameters): the step takes 9 of 240 ms.
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

# The flat tensors of pending gathers take at most the memory of this many largest buckets.
NUM_FLAT_TENSORS = 4
# See Note [A lane an owner].
LANES_FROM_NBYTES = 2**20


class UnderWay:
    """Pending gathers by parameter.

    On an accelerator a gather stays until it is over, as each reading stream must wait. Two threads may use
    this: one steps during backward, while checkpointing runs a forward pass.
    """

    def __init__(self) -> None:
        self._gathers: deque[Pending] = deque()
        self._awaited: dict[Tensor, list[Pending]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> "tuple[type[UnderWay], tuple[()]]":
        """Copy and pickle without the gathers, which write to the original parameters."""
        return UnderWay, ()

    def __bool__(self) -> bool:
        return bool(self._gathers)

    @property
    def is_unclaimed(self) -> bool:
        """Whether a gather has not been waited for yet."""
        return any(pending.is_unclaimed for pending in self._gathers)

    def add(self, params: Iterable[Tensor], pending: Pending) -> None:
        """Add a started gather."""
        with self._lock:
            self._gathers.append(pending)
            for param in params:
                self._awaited.setdefault(param, []).append(pending)

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Make the current stream wait for some parameters' new values."""
        with self._lock:
            for param in params:
                left = [pending for pending in self._awaited.pop(param, ()) if not pending.wait()]
                if left:
                    self._awaited[param] = left
            if not self._awaited:
                self._gathers.clear()

    def wait(self) -> None:
        """Make the current stream wait for all gathers, in order of their start."""
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
        """Drop all gathers; the backend keeps their memory until it is done."""
        with self._lock:
            self._gathers.clear()
            self._awaited.clear()

    def _forget_all_but(self, left: Iterable[Pending]) -> None:
        """Drop finished gathers, or parameters would keep one for every step."""
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

    Owner r uses lane r modulo their number. Nothing may write to the parameters before ``wait()``.
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
    """Start the broadcasts that fill ``flat``; the wait settles the bucket, and ``take`` reads stamps."""
    works = (start_rows or start_broadcasts)(lanes, rows, bucket.label)

    def end() -> None:
        bucket.settle(flat)
        if take is not None:
            take()

    return Pending(works, [flat], end)


def start_broadcasts(
    lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
) -> list[Waitable]:
    """Broadcast each (rank, row) on the lane of that rank."""
    works: list[Waitable] = []
    for number, lane in enumerate(lanes):
        works += lane.broadcast_rows([row for row in rows if row[0] % len(lanes) == number], label)
    return works


class Gathers:
    """One optimizer's gathers and their stamps (None in a group of one).

    A step leaves the gathers of ``readers`` pending, as modules wait for them.
    """

    def __init__(self, stamps: Stamps | None = None) -> None:
        self.under_way = UnderWay()
        self.stamps = stamps
        self.readers: list[frozenset[Tensor]] = []
        self._lanes: Lease | None = None  # for owners, see Note [A lane an owner]; the same on every rank

    def __reduce__(self) -> "tuple[type[Gathers], tuple[Stamps | None]]":
        """Copy and pickle as new: modules wait for the original's gathers; a copy needs its own lanes."""
        return Gathers, (self.stamps,)

    def let_go(self, *, waits: bool) -> None:
        """Wait for pending gathers or abandon them, then release the lanes; no error if a rank died."""
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
        """Start the gathers of buckets in a step, without waiting."""
        with self._lent(group, buckets) as lanes:
            for bucket in buckets:
                lanes_of = _lanes_for(bucket, group, lanes)
                self.under_way.add(bucket.params, start_gather(lanes_of, bucket, self.stamps))

    def run(self, group: RankGroup, buckets: Sequence[ParamBucket], *, in_step: bool = False) -> None:
        """Gather buckets and wait; ``in_step`` sends stamps.

        As many run at once as memory allows, so an owner of short rows need not wait for the others.
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
        """Yield the lanes, if any; if the body fails, nobody else may use them."""
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
    """Whether lanes make a gather faster; the same on every rank."""
    sent = [bucket for bucket in buckets if _may_use_lanes(bucket, group)]
    if group.size == 1 or sum(bucket.nbytes for bucket in sent) < LANES_FROM_NBYTES:
        return False
    return len({row.owner for bucket in sent for row in bucket.layout.rows}) > 1


def _may_use_lanes(bucket: ParamBucket, group: RankGroup) -> bool:
    return not is_asynchronous(bucket.device) and group.backend_of(bucket.device) == "gloo"


def _lanes_for(bucket: ParamBucket, group: RankGroup, lanes: Sequence[RankGroup]) -> Sequence[RankGroup]:
    return lanes if lanes and _may_use_lanes(bucket, group) else (group,)
