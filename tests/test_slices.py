"""`Slices` computes which part of a bucket each rank reduces, and which parts of it belong to whose row."""

import pytest
import torch

from zero_optim.plan.slices import UNIT, Slices

ROWS = [(0,), (5,), (4, 4), (3, 5), (0, 100, 0), (40, 0, 0), (17, 33, 1, 0, 7), (0, 0)]


@pytest.mark.parametrize("rows", ROWS)
def test_slices_and_rows_share_each_element_once(rows: tuple[int, ...]) -> None:
    every = [Slices(rank, rows) for rank in range(len(rows))]
    length, total = every[0].slice, sum(rows)
    assert length * len(rows) >= total
    of_slices = [slices.splits[0] for slices in every]
    of_rows = [slices.splits[1] for slices in every]
    assert [list(column) for column in zip(*of_slices, strict=True)] == of_rows
    assert [sum(parts) for parts in of_rows] == list(rows)
    used = [max(0, min(total, length * (rank + 1)) - length * rank) for rank in range(len(rows))]
    assert [sum(parts) for parts in of_slices] == used


def test_equal_rows_are_the_slices() -> None:
    slices = Slices(1, (5, 5, 5))
    assert slices.is_even
    assert slices.slice == 5
    assert slices.splits == ([0, 5, 0], [0, 5, 0])


def test_other_slices_are_multiples_of_a_unit() -> None:
    slices = Slices(0, (5, 6, 5))
    assert not slices.is_even
    assert slices.slice == UNIT


def test_rows_adjoin_in_the_order_of_ranks() -> None:
    rows = (3, 0, 5)
    parts = [Slices(rank, rows).row(torch.arange(16)).tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
