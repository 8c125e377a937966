"""Buckets of sharded gradients are sent in portions: where these lie, and that they change nothing else."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from parity import assert_row
from parity_runs import Row
from pool import Ranks
from sharded import Setting
from test_sharded_errors import goes_on_after_a_failure, keeps_sums
from zero_optim.comm.pending import Pending
from zero_optim.ddp.owners import owner_line, owner_reducer, owner_rows
from zero_optim.ddp.owners.owner_bucket import OwnerBucket
from zero_optim.ddp.owners.owner_rows import OwnerRows, most_portions, num_portions
from zero_optim.ddp.owners.owners import Owners
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.step.partial import PartialGradient


def test_two_buckets_are_enough_for_portions() -> None:
    assert most_portions(1) == 1
    assert most_portions(2) == 2  # of which the second is under way while the next bucket begins
    for size in range(3, 100):
        count = most_portions(size)
        shares = [Fraction(size - 1, size) * (1 + Fraction(4, number)) for number in (count, count - 1)]
        assert shares[0] <= 2 < shares[1]
        assert 2 <= count <= 4


def test_no_portion_is_larger_than_those_of_the_largest_bucket_or_very_small() -> None:
    mib = 2**20
    assert num_portions(8 * mib, 8 * mib, 4) == 4
    assert num_portions(5 * mib, 8 * mib, 4) == 3
    assert (
        num_portions(mib, 8 * mib, 4) == num_portions(mib // 16, mib // 16, 4) == num_portions(0, 0, 4) == 1
    )


PIECES = (
    (Piece(0, 0, 20), Piece(2, 20, 50)),
    (Piece(1, 0, 4),),
    (Piece(0, 0, 1),),
    (Piece(1, 0, 2),),
    (Piece(0, 0, 6), Piece(1, 6, 20)),
    (Piece(2, 0, 64),),
)


def some_gradients() -> list[Tensor]:
    image = torch.rand(20, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    return [
        torch.rand(50, 3),
        torch.rand(4),
        torch.tensor(7.0),
        torch.rand(2, 0),
        image,
        torch.rand(3, 64).t(),
    ]


def new_bucket(
    params: Sequence[Tensor], pieces: Sequence[Pieces], rank: int, size: int, **options: Any
) -> OwnerBucket:
    owners = Owners(dict(zip(params, pieces, strict=True)), dict.fromkeys(params, ""), rank, size)
    return OwnerBucket(range(len(params)), params, owners, **options)


def some_bucket(count: int, rank: int, like: list[Tensor], *, carries_word: bool = False) -> OwnerBucket:
    params = [torch.zeros_like(each).requires_grad_() for each in like]
    bucket = new_bucket(params, PIECES, rank, 4, carries_word=carries_word, num_portions=count)
    bucket.begin({}, adds_at_once=False)
    return bucket


def as_given(grad: Tensor) -> Tensor:
    return grad


def in_other_strides(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t() if grad.dim() == 2 else grad.contiguous()


@pytest.mark.parametrize("restride", [as_given, in_other_strides])
@pytest.mark.parametrize("carries_word", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_owners_find_their_rows_in_what_the_portions_make(
    count: int, carries_word: bool, restride: Callable[[Tensor], Tensor]
) -> None:
    lengths = [6 * 75 + 80, 14 * 75 + 16, 192 + 96, 0]  # with padding between gradients
    for rank in range(4):
        gradients = some_gradients()
        bucket = some_bucket(count, rank, gradients, carries_word=carries_word)
        for param, gradient in zip(bucket.params, gradients, strict=True):
            param.grad = restride(gradient)
        bucket.take(range(6), 1.0)
        if carries_word:
            bucket.write_failure_word()
        rows = bucket.rows()
        popped = [rows.pop(number) for number in range(count)]
        whole = [torch.cat(of_rank) for of_rank in zip(*popped, strict=True)]
        assert [len(row) for row in whole] == [length + carries_word for length in lengths]
        assert all(bool(row[-1:].isnan().all()) for row in whole) or not carries_word
        assert torch.equal(whole[rank][: lengths[rank]], rows.own[: lengths[rank]])
        bucket.give(bucket.take_over(rows.own), [False] * 6)
        for param, gradient, pieces in zip(bucket.params, gradients, PIECES, strict=True):
            own = param.grad.piece if isinstance(param.grad, PartialGradient) else param.grad
            pieces_here = [piece for piece in pieces if piece.owner == rank]
            assert (own is not None) == bool(pieces_here)
            for piece in pieces_here:
                assert own is not None
                assert torch.equal(own, gradient[piece.start : piece.stop] if gradient.dim() else gradient)
                assert own.stride() == gradient.stride()
                assert own.storage_offset() % 16 == 0


def test_portions_of_a_row_are_equally_long() -> None:
    params = [torch.rand(100, 16), torch.rand(100)]
    bucket = new_bucket(params, ((Piece(0, 0, 100),),) * 2, 0, 2, num_portions=4)
    rows = bucket.rows()
    assert [[len(row) for row in rows.pop(number)] for number in range(4)] == [[425, 0]] * 4


def test_other_ranks_portions_are_made_when_gradients_come() -> None:
    bucket = some_bucket(4, 1, some_gradients())
    bucket.take([1], 1.0)  # of rank 1 itself
    with mock.patch.object(OwnerRows, "_new", autospec=True, side_effect=OwnerRows._new) as made:
        bucket.take([1], 1.0)
        assert not made.called
        bucket.take([2], 1.0)
        assert made.call_count == 1


@contextlib.contextmanager
def three_portions() -> Iterator[list[int]]:
    """Have buckets sent in up to three portions, however small, and give how many each had."""
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
        yield counts


def runs_in_portions(check: Callable[..., object], *args: object) -> None:
    with three_portions() as counts:
        check(*args)
    assert 3 in counts


def test_portions_are_summed_in_the_order_of_ranks(ranks4: Ranks) -> None:
    ranks4.run(runs_in_portions, assert_row, Row("gradients", "tower", "adding", "four ranks"))


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (assert_row, (Row("gradients", "tower", "ordinary", "plain"),)),
        (goes_on_after_a_failure, ()),
        (keeps_sums, (Setting(),)),
    ],
    ids=["training", "failure", "adding up"],
)
def test_portions_change_nothing_else(
    ranks2: Ranks, check: Callable[..., object], args: tuple[object]
) -> None:
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
