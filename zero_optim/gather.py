"""Bring every bucket's rows from their owners to all ranks."""

from collections.abc import Sequence

from zero_optim.collectives import Pending, RankGroup
from zero_optim.storage import Bucket, rows_of


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


def gather_all(group: RankGroup, buckets: Sequence[Bucket]) -> None:
    """Gather buckets all together and wait; all ranks call. Nothing to do in a group of one."""
    for pending in [launch_gather(group, bucket) for bucket in buckets]:
        pending.wait()
