"""Bring every bucket's rows from their owners to all ranks."""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from zero_optim.comm.collectives import Pending, RankGroup
from zero_optim.plan.layout import Span
from zero_optim.shard.storage import ParamBucket, rows_of

# Enough to keep the wire busy; each one under way holds a flat tensor where parameters are no views.
NUM_UNDER_WAY = 4


class UnderWay:
    """Gathers that were launched and may not have ended, each with the parameters that it brings.

    Two threads may use it at the same time: one launches steps of the backward pass, while in that
    pass a forward pass is run again (checkpointing) and waits for what it needs.
    """

    def __init__(self) -> None:
        self._gathers: deque[Pending] = deque()
        self._awaited: dict[Tensor, list[Pending]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> "tuple[type[UnderWay], tuple[()]]":
        """Copy and pickle without what is under way, which lands in the parameters it was launched for."""
        return UnderWay, ()

    def __bool__(self) -> bool:
        return bool(self._gathers)

    def add(self, params: Iterable[Tensor], pending: Pending) -> None:
        """Keep a gather."""
        with self._lock:
            self._gathers.append(pending)
            for param in params:
                self._awaited.setdefault(param, []).append(pending)

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Wait until some parameters have their new values."""
        with self._lock:
            for param in params:
                for pending in self._awaited.pop(param, ()):
                    pending.wait()
            if not self._awaited:
                self._gathers.clear()

    def wait(self) -> None:
        """Wait for all, in the order in which they were launched."""
        with self._lock:
            while self._gathers:
                self._gathers.popleft().wait()
            self._awaited.clear()


def start_gather(group: RankGroup, bucket: ParamBucket) -> Pending:
    """Launch the gather of one bucket; all ranks call, in the same order of buckets.

    One collective for each owner that holds a part of the bucket.

    Returns:
        The gather under way. Parameters of other owners have their new values after ``wait()``;
        until then nobody may write to any parameter of the bucket.
    """
    flat = bucket.fill()
    works = group.share_rows(rows_of(flat, bucket.layout))
    return Pending(works, [flat], lambda: bucket.settle(flat))


def start_gather_of_part(
    lanes: Sequence[RankGroup], bucket: ParamBucket, chosen: Collection[int], spans: Sequence[Span]
) -> Pending:
    """Launch the gather of some parameters of a bucket; all ranks call, in the same order.

    Args:
        lanes: groups of the same ranks. Owner r sends on lane r modulo their number: what different owners
            send is then under way at the same time in both directions, where one group may take turns.
        bucket: whose parameters.
        chosen: which of them, counted within the bucket.
        spans: where they lie.
    """
    flat = bucket.fill(chosen)
    works = []
    for number, lane in enumerate(lanes):
        mine = [(run.owner, flat[run.start : run.stop]) for run in spans if run.owner % len(lanes) == number]
        works += lane.share_rows(mine)
    return Pending(works, [flat], lambda: bucket.settle(flat, chosen))


def start_gathers(group: RankGroup, buckets: Sequence[ParamBucket], under_way: UnderWay) -> None:
    """Launch the gathers of buckets, and wait for none; all ranks call."""
    for bucket in buckets:
        under_way.add(bucket.params, start_gather(group, bucket))


def gather_buckets(group: RankGroup, buckets: Sequence[ParamBucket]) -> None:
    """Gather buckets, some at a time, and wait; all ranks call. Nothing to do in a group of one."""
    under_way: deque[Pending] = deque()
    for bucket in buckets:
        if len(under_way) == NUM_UNDER_WAY:
            under_way.popleft().wait()
        under_way.append(start_gather(group, bucket))
    for pending in under_way:
        pending.wait()
