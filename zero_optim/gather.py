"""Bring every bucket's rows from their owners to all ranks."""

from collections import deque
from collections.abc import Sequence

from zero_optim.collectives import Pending, RankGroup
from zero_optim.storage import Bucket, rows_of

# Enough to keep the wire busy; each one under way holds a flat tensor where parameters are no views.
NUM_UNDER_WAY = 4


def launch_gather(group: RankGroup, bucket: Bucket) -> Pending:
    """Launch the gather of one bucket; all ranks call, in the same order of buckets.

    One collective for each owner that holds a part of the bucket.

    Returns:
        The gather under way. Parameters of other owners have their new values after ``wait()``;
        until then nobody may write to any parameter of the bucket.
    """
    flat = bucket.fill()
    works = group.share_rows(rows_of(flat, bucket.layout))
    return Pending(works, [flat], lambda: bucket.settle(flat))


def gather_buckets(group: RankGroup, buckets: Sequence[Bucket]) -> None:
    """Gather buckets, some at a time, and wait; all ranks call. Nothing to do in a group of one."""
    under_way: deque[Pending] = deque()
    for bucket in buckets:
        if len(under_way) == NUM_UNDER_WAY:
            under_way.popleft().wait()
        under_way.append(launch_gather(group, bucket))
    for pending in under_way:
        pending.wait()
