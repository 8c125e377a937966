"""Gathers: the owners broadcast their rows of each bucket to all ranks.

All functions that take a group or lanes communicate, and all ranks call them in the same order of buckets.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from zero_optim.comm.collectives import Pending, RankGroup
from zero_optim.plan.layout import Span
from zero_optim.shard.storage import ParamBucket, rows_of

# Enough to keep the network busy. Each gather under way has a flat tensor, unless parameters are views of it.
NUM_UNDER_WAY = 4


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

    def _forget_all_but(self, left: Iterable[Pending]) -> None:
        """Let go of the others, which are over: else each parameter would keep one for every step."""
        kept = {id(pending) for pending in left}
        awaited = self._awaited.items() if kept else ()
        of_params = ((param, [one for one in some if id(one) in kept]) for param, some in awaited)
        self._awaited = {param: some for param, some in of_params if some}


def start_gather(group: RankGroup, bucket: ParamBucket) -> Pending:
    """Start the gather of one bucket; all ranks call, in the same order of buckets.

    One broadcast for each owner that has a row in the bucket; one launch for all of them where the backend
    has such a thing.

    Returns:
        The gather. Parameters of other owners have their new values after ``wait()``, on an accelerator for
        work of the stream that waited. Until then nothing may write to any parameter of the bucket.
    """
    flat = bucket.fill()
    works = group.broadcast_rows(rows_of(flat, bucket.layout))
    return Pending(works, [flat], lambda: bucket.settle(flat))


def start_gather_of_part(
    lanes: Sequence[RankGroup], bucket: ParamBucket, chosen: Collection[int], spans: Sequence[Span]
) -> Pending:
    """Start the gather of some parameters of a bucket; all ranks call, in the same order.

    Args:
        lanes: groups of the same ranks. Owner r sends on lane r modulo their number: one gloo group is not
            reliably full duplex, several are.
        bucket: the bucket.
        chosen: indices of the parameters within the bucket.
        spans: where they lie.
    """
    flat = bucket.fill(chosen)
    works = []
    for number, lane in enumerate(lanes):
        mine = [span for span in spans if span.owner % len(lanes) == number]
        works += lane.broadcast_rows([(span.owner, flat[span.start : span.stop]) for span in mine])
    return Pending(works, [flat], lambda: bucket.settle(flat, chosen))


def start_gathers(group: RankGroup, buckets: Sequence[ParamBucket], under_way: UnderWay) -> None:
    """Start the gathers of buckets, and wait for none; all ranks call."""
    for bucket in buckets:
        under_way.add(bucket.params, start_gather(group, bucket))


def gather_buckets(group: RankGroup, buckets: Sequence[ParamBucket]) -> None:
    """Gather buckets, `NUM_UNDER_WAY` at a time, and wait for all; all ranks call.

    In a group of one it does not communicate.
    """
    under_way: deque[Pending] = deque()
    for bucket in buckets:
        if len(under_way) == NUM_UNDER_WAY:
            under_way.popleft().wait()
        under_way.append(start_gather(group, bucket))
    for pending in under_way:
        pending.wait()
