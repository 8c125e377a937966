"""`ReduceScatterBucketer`: what each rank receives, and what is sent together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawn import SAME
from pool import Pool, Ranks
from zero_optim.comm.lanes import lanes_beside
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
    sends: list[list[int]] = []
    order: list[int] = []
    right = [False] * len(calls)
    rank, size = dist.get_rank(), dist.get_world_size()

    class Recorded(bucketer.RowSum):
        def __init__(self, group: Any, lanes: Any, rows: Sequence[Tensor]) -> None:
            sends.append([row.numel() for row in rows])
            super().__init__(group, lanes, rows)

    collected = ReduceScatterBucketer(cap_kib / 1024)
    with patch.object(bucketer, "RowSum", Recorded):
        for number, call in enumerate(calls):

            def take(total: Tensor, number: int = number, call: Call = call) -> None:
                order.append(number)
                right[number] = torch.equal(total, sum_in_rank_order(call, number, rank, size))

            collected.reduce_scatter_async(chunks_of(call, number, rank), group, take)
        collected.flush()
    collected.teardown()
    return sends, order, right


def test_every_rank_gets_its_own_chunk_summed_in_the_order_of_ranks(ranks_2_and_4: Ranks) -> None:
    size = ranks_2_and_4.size
    calls = [Call((n,) * size) for n in (1, 7, 0, 64, 1000)]
    for sends, order, right in ranks_2_and_4.run(run, calls, 1024):
        assert sends == [[1072] * size]
        assert order == [0, 1, 2, 3, 4]
        assert all(right)


def test_chunks_may_differ_in_length(ranks4: Ranks) -> None:
    calls = [Call((5, 0, 0, 3)), Call((0, 0, 9, 0)), Call((1, 2, 3, 4))]
    for sends, order, right in ranks4.run(run, calls, 1024):
        assert sends == [[6, 2, 12, 7]]
        assert (order, right) == ([0, 1, 2], [True] * 3)


def test_the_capacity_is_over_the_chunks_of_all_ranks(ranks4: Ranks) -> None:
    calls = [kilobytes(1, 1, 1, 1), kilobytes(1, 1, 1, 1), kilobytes(0, 0, 1, 0)]
    for sends, order, right in ranks4.run(run, calls, 8):
        assert sends == [[512] * 4, [0, 0, 256, 0]]
        assert (order, right) == ([0, 1, 2], [True] * 3)


def test_an_input_that_does_not_fit_sends_the_bucket_first(ranks2: Ranks) -> None:
    calls = [kilobytes(2, 2), kilobytes(2, 2), kilobytes(1, 0), kilobytes(0, 7)]
    for sends, order, right in ranks2.run(run, calls, 8):
        assert sends == [[1024, 1024], [256, 1792]]
        assert (order, right) == ([0, 1, 2, 3], [True] * 4)


def test_an_input_larger_than_a_bucket_goes_at_once_ahead_of_what_has_collected(ranks2: Ranks) -> None:
    calls = [kilobytes(1, 1), kilobytes(5, 4), kilobytes(1, 1)]
    for sends, order, right in ranks2.run(run, calls, 8):
        assert sends == [[1280, 1024], [512, 512]]
        assert (order, right) == ([1, 0, 2], [True] * 3)


def test_an_input_as_large_as_a_bucket_waits_in_it(ranks2: Ranks) -> None:
    calls = [kilobytes(4, 4), kilobytes(0, 1), kilobytes(8, 0)]
    for sends, order, right in ranks2.run(run, calls, 8):
        assert sends == [[1024, 1024], [0, 256], [2048, 0]]
        assert (order, right) == ([0, 1, 2], [True] * 3)


@pytest.mark.parametrize("cap", [0, -1, -math.inf])
def test_without_capacity_nothing_collects(ranks2: Ranks, cap: float) -> None:
    calls = [kilobytes(1, 1)] * 4
    for sends, order, right in ranks2.run(run, calls, cap):
        assert sends == [[256, 256]] * 4
        assert (order, right) == ([0, 1, 2, 3], [True] * 4)


def test_dtypes_do_not_share_a_bucket(ranks2: Ranks) -> None:
    calls = [Call((3, 4)), Call((5, 6), torch.bfloat16), Call((7, 8)), Call((1, 1), torch.float64)]
    for sends, order, right in ranks2.run(run, calls, 1024):
        assert sends == [[10, 12], [5, 6], [1, 1]]
        assert (order, right) == ([0, 2, 1, 3], [True] * 4)


def lanes_of_two_dtypes() -> tuple[int, int, int]:
    """How many leases were taken; how many sends there were, and over how many different sets of lanes."""
    leases: list[Any] = []
    used: list[frozenset[int]] = []

    def counted(ranks: Any) -> Any:
        leases.append(lanes_beside(ranks))
        return leases[-1]

    class Recorded(bucketer.RowSum):
        def __init__(self, group: Any, lanes: Any, rows: Sequence[Tensor]) -> None:
            used.append(frozenset(map(id, lanes)))
            super().__init__(group, lanes, rows)

    collected = ReduceScatterBucketer()
    with patch.object(bucketer, "lanes_beside", counted), patch.object(bucketer, "RowSum", Recorded):
        for dtype in (torch.float32, torch.bfloat16):
            collected.reduce_scatter_async([torch.ones(3, dtype=dtype)] * 2)
        collected.flush()
    collected.teardown()
    return len(leases), len(used), len(set(used))


def test_dtypes_share_the_process_groups_on_which_they_are_sent(ranks2: Ranks) -> None:
    assert ranks2.run(lanes_of_two_dtypes) == [(1, 2, 1)] * 2


def test_one_rank_gets_its_chunk_back(ranks1: Ranks) -> None:
    assert ranks1.run(run, [Call((3,)), Call((2,))], 1024) == [([[5]], [0, 1], [True, True])]


@settings(SAME, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), max_size=12),
    st.sampled_from([0, 1, 2, 4, 16]),
)
def test_whatever_comes_each_sum_is_right_and_each_is_called_back_once(
    pool: Pool, lengths: list[tuple[int, int]], cap_kib: int
) -> None:
    calls = [Call(each) for each in lengths]
    capacity = 256 * cap_kib
    (sends, order, right), (sends_of_other, *_) = pool.run(2, run, calls, cap_kib)
    assert sends == sends_of_other
    assert all(right)
    assert sorted(order) == list(range(len(calls)))
    small = [number for number in order if sum(lengths[number]) <= capacity]
    assert small == sorted(small)
    assert all(sum(rows) <= capacity or tuple(rows) in lengths for rows in sends)
    assert sum(map(sum, sends)) == sum(map(sum, lengths))


def when_called_back() -> list[tuple[str, float]]:
    """What each callback receives, between the moments of the caller."""
    seen: list[tuple[str, float]] = []
    collected = ReduceScatterBucketer()
    for number in range(3):
        chunks = [torch.tensor([10.0 * number + receiver]) for receiver in range(2)]
        collected.reduce_scatter_async(
            chunks, None, lambda total, name=f"call {number}": seen.append((name, total.item()))
        )
    seen.append(("flush", 0.0))
    collected.flush()
    seen.append(("flushed", 0.0))
    collected.flush()
    collected.teardown()
    return seen


def test_a_flush_sends_what_is_left_and_calls_each_callback_with_its_own_sum_in_order(ranks2: Ranks) -> None:
    for rank, seen in enumerate(ranks2.run(when_called_back)):
        sums = [(f"call {number}", 2 * (10.0 * number + rank)) for number in range(3)]
        assert seen == [("flush", 0.0), *sums, ("flushed", 0.0)]


def called_back_after_each_call() -> list[list[int]]:
    """The calls that were called back after each call, where nothing collects; and after the flush."""
    called: list[int] = []
    seen: list[list[int]] = []
    collected = ReduceScatterBucketer(0)
    for number in range(5):
        collected.reduce_scatter_async(
            [torch.ones(3)] * 2, None, lambda total, number=number: called.append(number)
        )
        seen.append(called.copy())
    collected.flush()
    collected.teardown()
    return [*seen, called]


def test_at_most_two_sums_are_under_way_after_a_call(ranks2: Ranks) -> None:
    want = [[], [], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert ranks2.run(called_back_after_each_call) == [want] * 2


def shapes_given_back() -> list[torch.Size]:
    shapes: list[torch.Size] = []
    collected = ReduceScatterBucketer()
    chunks = [torch.ones(2, 3).t(), torch.ones(4, 1, 2)]
    collected.reduce_scatter_async(chunks, callback_fn=lambda total: shapes.append(total.shape))
    collected.reduce_scatter_async(chunks)  # nobody to call back
    assert shapes == []
    collected.flush()
    collected.flush()
    return shapes


def test_a_sum_has_the_shape_of_the_chunk(ranks2: Ranks) -> None:
    assert ranks2.run(shapes_given_back) == [[torch.Size([3, 2])], [torch.Size([4, 1, 2])]]


def in_a_sub_group() -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    got: list[float] = []
    collected = ReduceScatterBucketer()
    chunks = [torch.tensor([10.0 * dist.get_rank()]), torch.tensor([10.0 * dist.get_rank() + 1])]
    collected.reduce_scatter_async(chunks, mine, lambda total: got.append(total.item()))
    everyone = [torch.tensor([1.0])] * 4
    collected.reduce_scatter_async(everyone, None, lambda total: got.append(total.item()))
    collected.flush()
    collected.teardown()
    return got


def test_groups_do_not_share_a_bucket(ranks4: Ranks) -> None:
    assert ranks4.run(in_a_sub_group) == [[10.0, 4.0], [12.0, 4.0], [50.0, 4.0], [52.0, 4.0]]


def inputs_after_use() -> bool:
    chunks = chunks_of(Call((300,) * dist.get_world_size()), 0, dist.get_rank())
    before = [chunk.clone() for chunk in chunks]
    for cap in (0.0, 1.0):
        collected = ReduceScatterBucketer(cap)
        collected.reduce_scatter_async(chunks, None, Tensor.zero_)
        collected.flush()
    return all(map(torch.equal, chunks, before))


def test_inputs_are_not_changed_and_the_sum_is_the_callers(ranks2: Ranks) -> None:
    assert ranks2.run(inputs_after_use) == [True, True]


def test_one_rank_may_keep_the_sum_and_change_it(ranks1: Ranks) -> None:
    assert ranks1.run(inputs_after_use) == [True]


def wrong_calls() -> list[str]:
    collected, one = ReduceScatterBucketer(), torch.ones(1)
    messages = []
    for chunks in ([one], [one, one.double()], [one, one.to_sparse()]):
        try:
            collected.reduce_scatter_async(chunks)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    collected.flush()
    return messages


def test_inputs_that_cannot_be_sent_are_refused(ranks2: Ranks) -> None:
    for count, dtypes, sparse in ranks2.run(wrong_calls):
        assert count == "expected a chunk for each of 2 ranks, got 1"
        assert dtypes.endswith("got torch.float32 on cpu and torch.float64 on cpu")
        assert sparse.startswith("expected dense chunks")


@pytest.mark.parametrize("cap", [float("inf"), float("nan"), "25", None])
def test_a_capacity_that_is_no_number_is_refused(cap: Any) -> None:
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        ReduceScatterBucketer(cap)


def callbacks_after_teardown() -> list[float]:
    got: list[float] = []
    collected = ReduceScatterBucketer(8 / 2**20)
    for value in (1.0, 2.0):
        collected.reduce_scatter_async(
            [torch.tensor([value])] * 2, None, lambda total: got.append(total.item())
        )
    collected.teardown()
    collected.reduce_scatter_async([torch.tensor([3.0])] * 2, None, lambda total: got.append(total.item()))
    collected.flush()
    return got


def test_after_teardown_nothing_is_called_back_and_it_can_be_used_again(ranks2: Ranks) -> None:
    assert ranks2.run(callbacks_after_teardown) == [[6.0], [6.0]]
