"""Buckets of sharded gradients are sent in portions, which changes nothing else."""

from collections.abc import Callable
from unittest import mock

import pytest

from parity import assert_row
from parity_runs import Row
from pool import Pool
from sharded import Setting
from test_sharded_errors import goes_on_after_a_failure, keeps_sums
<<<<<<< HEAD
from zero_optim.comm.pending import Pending
from zero_optim.ddp.owners import owner_line, owner_reducer, owner_rows
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_rows import OwnerRows, most_portions, num_portions
from zero_optim.ddp.owners.owners import Owners
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.step.partial import PartialGradient
=======
from zero_optim.ddp.owners import owner_reducer, owner_rows
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_rows import OwnerRows
>>>>>>> h-t1


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
<<<<<<< HEAD
    ranks2.run(runs_in_portions, check, *args)


@contextlib.contextmanager
def told_of_sums() -> Iterator[list[str]]:
    """Have sums of rows not made, but told of: what starts, and what is waited for."""
    told: list[str] = []

    class Recorded:
        def __init__(
            self, _group: object, _lanes: object, _rows: object, *, in_place: bool, about: str
        ) -> None:
            assert in_place
            self.about = about
            told.append(f"start {about}")

        def wait(self) -> None:
            told.append(f"end {self.about}")

    with mock.patch.object(owner_line, "start_row_sum", Recorded):
        yield told


def launches_and_line(
    count: int, num_portions: int, *, is_apart: bool = True
) -> tuple[list[Callable[[], Pending[torch.Tensor]]], owner_line.OwnerLine]:
    """What launches each of some buckets in a line, and the line."""
    nobody: Any = SimpleNamespace(groups=())
    line = owner_line.OwnerLine(nobody, nobody, is_apart=is_apart)
    whole = ((Piece(0, 0, 4),),)
    buckets = [new_bucket([torch.rand(4, 2)], whole, 0, 1, num_portions=num_portions) for _ in range(count)]
    return [
        partial(line.launch, bucket.rows, bucket.take_over, f"bucket {number}")
        for number, bucket in enumerate(buckets)
    ], line


def test_a_bucket_that_fills_brings_the_one_before_along() -> None:
    (launch,), line = launches_and_line(1, 4)
    first, second, third, last = (f"bucket 0, portion {number} of 4" for number in range(1, 5))
    with told_of_sums() as told:
        line.keep_pace(1.0)  # nothing is under way
        launched = launch()
        line.keep_pace(0.2)
        assert told == [f"start {first}", f"start {second}"]
        line.keep_pace(0.5)
        assert told[2:] == [f"end {first}", f"start {third}", f"end {second}", f"start {last}"]
        line.keep_pace(1.0)
        assert told[6:] == [f"end {third}"]
        launched.wait()
        assert told[7:] == [f"end {last}"]


def test_a_bucket_is_sent_while_the_last_portion_of_the_one_before_is_under_way() -> None:
    launches, line = launches_and_line(3, 2)
    (a1, a2), (b1, b2), (c1, c2) = (
        [f"bucket {bucket}, portion {number} of 2" for number in (1, 2)] for bucket in range(3)
    )
    with told_of_sums() as told:
        launched = [launches[0](), launches[1]()]
        assert told == [f"start {a1}", f"start {a2}", f"end {a1}", f"start {b1}"]
        line.keep_pace(0.1)  # the third bucket gets its first gradient: memory for it is made here
        assert told[4:] == [f"end {a2}", f"start {b2}"]
        launched.append(launches[2]())
        assert told[6:] == [f"end {b1}", f"start {c1}"]
        for reduction in launched:
            reduction.wait()
        assert told[8:] == [f"end {b2}", f"start {c2}", f"end {c1}", f"end {c2}"]


def test_where_rows_mix_with_what_else_is_sent_a_bucket_waits_for_the_one_before() -> None:
    launches, _ = launches_and_line(2, 1, is_apart=False)
    with told_of_sums() as told:
        for launch in launches:
            launch()
        assert told == ["start bucket 0", "end bucket 0", "start bucket 1"]
=======
    pool.run(size, runs_in_portions, check, *args)
>>>>>>> h-t1
