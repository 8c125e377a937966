"""`ReduceScatterBucketer`: what each rank receives, and what is sent together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import Pool, on_ranks
from zero_optim.ddp import ReduceScatterBucketer, bucketer


@dataclass(frozen=True)
class Call:
    """One call: the number of elements of each rank's chunk, and their dtype."""

    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def chunks_of(call: Call, number: int, rank: int) -> list[Tensor]:
    """The input of a rank to the call of a given number, which every rank can make for all."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(length, generator=generator).to(call.dtype) for length in call.lengths]


def sum_in_rank_order(call: Call, number: int, rank: int, size: int) -> Tensor:
    parts = [chunks_of(call, number, sender)[rank] for sender in range(size)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def kilobytes(*each: int) -> Call:
    """A call whose chunks take so many KiB."""
    return Call(tuple(256 * n for n in each))


def run(
    calls: Sequence[Call], cap_kib: float, group: Any = None
) -> tuple[list[list[int]], list[int], list[bool]]:
    """Makes calls, and flushes.

    Returns:
        By send, the lengths of the rows; the numbers of the calls in the order in which they were called
        back; whether each call's sum is right, to the bit.
    """
    order: list[int] = []
    right = [False] * len(calls)
    rank, size = dist.get_rank(), dist.get_world_size()
    collected = ReduceScatterBucketer(cap_kib / 1024)
    with patch.object(bucketer, "start_row_sum", wraps=bucketer.start_row_sum) as sums:
        for number, call in enumerate(calls):

            def take(total: Tensor, number: int = number, call: Call = call) -> None:
                order.append(number)
                right[number] = torch.equal(total, sum_in_rank_order(call, number, rank, size))

            collected.reduce_scatter_async(chunks_of(call, number, rank), group, take)
        collected.flush()
    collected.teardown()
    return [list(call.args[3].rows) for call in sums.call_args_list], order, right


HALF = torch.bfloat16
# World size; capacity in KiB; calls; by send, the lengths of the rows; calls in the order of callbacks.
CASES: dict[str, tuple[int, float, list[Call], list[list[int]], list[int]]] = {
    "two ranks": (2, 1024, [Call((n,) * 2) for n in (1, 7, 0, 64, 1000)], [[1072] * 2], [0, 1, 2, 3, 4]),
    "one rank gets its chunk back": (1, 1024, [Call((3,)), Call((2,))], [[5]], [0, 1]),
    "chunks may differ in length": (
        4, 1024, [Call((5, 0, 0, 3)), Call((0, 0, 9, 0)), Call((1, 2, 3, 4))], [[6, 2, 12, 7]], [0, 1, 2],
    ),
    "the capacity is over the chunks of all ranks": (
        4, 8, [kilobytes(1, 1, 1, 1), kilobytes(1, 1, 1, 1), kilobytes(0, 0, 1, 0)],
        [[512] * 4, [0, 0, 256, 0]], [0, 1, 2],
    ),
    "an input that does not fit sends the bucket first": (
        2, 8, [kilobytes(2, 2), kilobytes(2, 2), kilobytes(1, 0), kilobytes(0, 7)],
        [[1024, 1024], [256, 1792]], [0, 1, 2, 3],
    ),
    "an input larger than a bucket goes at once, ahead of what has collected": (
        2, 8, [kilobytes(1, 1), kilobytes(5, 4), kilobytes(1, 1)], [[1280, 1024], [512, 512]], [1, 0, 2],
    ),
    "an input as large as a bucket waits in it": (
        2, 8, [kilobytes(4, 4), kilobytes(0, 1), kilobytes(8, 0)],
        [[1024, 1024], [0, 256], [2048, 0]], [0, 1, 2],
    ),
    "with capacity 0 nothing collects": (2, 0, [kilobytes(1, 1)] * 4, [[256, 256]] * 4, [0, 1, 2, 3]),
    "dtypes do not share a bucket": (
        2, 1024, [Call((3, 4)), Call((5, 6), HALF), Call((7, 8)), Call((1, 1), torch.float64)],
        [[10, 12], [5, 6], [1, 1]], [0, 2, 1, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_sum_is_right_and_is_sent_with_what_fits(pool: Pool, case: str) -> None:
    size, cap, calls, sends, order = CASES[case]
    assert pool.run(size, run, calls, cap) == [(sends, order, [True] * len(calls))] * size


@on_ranks(2)
def test_a_sum_has_the_shape_of_the_chunk() -> None:
    shapes: list[torch.Size] = []
    collected = ReduceScatterBucketer()
    chunks = [torch.ones(2, 3).t(), torch.ones(4, 1, 2)]
    collected.reduce_scatter_async(chunks, callback_fn=lambda total: shapes.append(total.shape))
    collected.reduce_scatter_async(chunks)  # nobody to call back
    assert shapes == []
    collected.flush()
    collected.flush()
    assert shapes == [chunks[dist.get_rank()].shape]


@on_ranks(4)
def test_groups_do_not_share_a_bucket() -> None:
    rank, got = dist.get_rank(), list[float]()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    collected = ReduceScatterBucketer()
    chunks = [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
    collected.reduce_scatter_async(chunks, pairs[rank // 2], lambda total: got.append(total.item()))
    everyone = [torch.tensor([1.0])] * 4
    collected.reduce_scatter_async(everyone, None, lambda total: got.append(total.item()))
    collected.flush()
    collected.teardown()
    assert got == [[10.0, 12.0, 50.0, 52.0][rank], 4.0]


@on_ranks(2)
def test_inputs_are_not_changed_and_the_sum_is_the_callers() -> None:
    chunks = chunks_of(Call((300,) * dist.get_world_size()), 0, dist.get_rank())
    before = [chunk.clone() for chunk in chunks]
    for cap in (0.0, 1.0):
        collected = ReduceScatterBucketer(cap)
        collected.reduce_scatter_async(chunks, None, Tensor.zero_)
        collected.flush()
    assert all(map(torch.equal, chunks, before))


@on_ranks(2)
def test_inputs_that_cannot_be_sent_are_refused() -> None:
    collected, one = ReduceScatterBucketer(), torch.ones(1)
    for chunks, message in (
        ([one], "expected a chunk for each of 2 ranks, got 1"),
        ([one, one.double()], r"got torch.float32 on cpu and torch.float64 on cpu$"),
        ([one, one.to_sparse()], "expected dense chunks"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            collected.reduce_scatter_async(chunks)
    collected.flush()
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        ReduceScatterBucketer(float("nan"))


@on_ranks(2)
def test_after_teardown_nothing_is_called_back_and_it_can_be_used_again() -> None:
    got: list[float] = []
    collected = ReduceScatterBucketer(8 / 2**20)

    def call(value: float) -> None:
        chunks = [torch.tensor([value])] * 2
        collected.reduce_scatter_async(chunks, None, lambda total: got.append(total.item()))

    call(1.0)
    call(2.0)
    collected.teardown()
    call(3.0)
    collected.flush()
    assert got == [6.0]
