"""Buckets of sharded gradients are sent in portions, which changes nothing else."""

from collections.abc import Callable
from unittest import mock

import pytest

from parity import assert_row
from parity_runs import Row
from pool import Pool
from sharded import Setting
from test_sharded_errors import goes_on_after_a_failure, keeps_sums
from zero_optim.ddp.owners import owner_reducer, owner_rows
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_rows import OwnerRows


def runs_in_portions(check: Callable[..., object], *args: object) -> None:
    """Have buckets sent in up to three portions, however small."""
    counts: list[int] = []
    original = OwnerBucket.rows

    def counted(bucket: OwnerBucket) -> OwnerRows:
        counts.append(bucket.num_portions)
        return original(bucket)

    with (
        mock.patch.object(owner_rows, "LEAST_PORTION_NBYTES", 1),
        mock.patch.object(owner_reducer, "most_portions", return_value=3),
        mock.patch.object(OwnerBucket, "rows", counted),
    ):
        check(*args)
    assert 3 in counts


@pytest.mark.parametrize(
    ("size", "check", "args"),
    [
        (4, assert_row, (Row("gradients", "tower", "adding", "four ranks"),)),
        (2, assert_row, (Row("gradients", "convolutions", "ordinary", "plain"),)),
        (2, goes_on_after_a_failure, ()),
        (2, keeps_sums, (Setting(),)),
    ],
    ids=["order of ranks", "training", "failure", "adding up"],
)
def test_portions_change_nothing_else(
    pool: Pool, size: int, check: Callable[..., object], args: tuple[object, ...]
) -> None:
    pool.run(size, runs_in_portions, check, *args)
