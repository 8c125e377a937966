"""Partition, layout and buckets: what test_properties.py does not show."""

import random

import pytest

from zero_optim.plan.layout import (
    Extent,
    Layout,
    Row,
    Span,
    rows_in_order,
    whole,
    with_rooms,
    with_rooms_behind,
)
from zero_optim.plan.partition import RankLoads, assign_buckets, assign_owners


def test_one_group_is_within_four_thirds_of_the_mean_when_no_item_is_large() -> None:
    rng = random.Random(1)
    for num_ranks in (2, 3, 8, 64):
        costs = [rng.randint(50, 100) for _ in range(num_ranks * 4)]
        ranks = RankLoads([0] * num_ranks)
        ranks.assign(costs)
        assert ranks.fullest() <= 4 / 3 * sum(costs) / num_ranks


def test_ties_go_by_index_and_by_rank() -> None:
    assert assign_owners([[5, 5, 5, 5, 5]], 3) == [[0, 1, 2, 0, 1]]
    assert assign_owners([[1, 9, 5]], 3) == [[2, 0, 1]]
    assert assign_owners([[0, 0, 0]], 2) == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], 0), "at least one rank"),
        (([[1]], 2, [0.0]), "one load for each of 2 ranks, got 1"),
        (([[1, -2]], 2), "got -2 for item 1"),
        (([[float("nan")]], 2), "got nan"),
        (([[float("inf")]], 2), "got inf"),
    ],
)
def test_costs_that_mean_nothing_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_owners(*arguments)  # type: ignore[arg-type]


TWO, ONE = (4, 2), (4,)
WHOLE = Row(0, 0, 4, (Extent(0, 0, 4, 0),))


@pytest.mark.parametrize(
    ("numels", "rows", "message"),
    [
        (TWO, [WHOLE], "parameter 1 of the bucket: 0 of its 2"),
        (TWO, [Row(0, 0, 6, (Extent(0, 0, 4, 0), Extent(1, 0, 2, 3)))], "overlaps"),
        (TWO, [Row(0, 0, 5, (Extent(0, 0, 4, 0), Extent(1, 0, 2, 4)))], "behind its row's end 5"),
        (TWO, [WHOLE, Row(1, 5, 7, (Extent(1, 0, 2, 5),))], "expected to start at 4"),
        (TWO, [WHOLE._replace(owner=1), Row(0, 4, 6, (Extent(1, 0, 2, 4),))], "rising rank"),
        (
            TWO,
            [Row(0, 0, 8, (Extent(0, 0, 4, 0), Extent(0, 0, 2, 4), Extent(1, 0, 2, 6)))],
            "start at 4, got 0",
        ),
        (TWO, [Row(0, 0, 6, (Extent(0, 0, 4, 0), Extent(1, 1, 2, 4)))], "start at 0, got 1"),
        (ONE, [Row(0, 0, 4, (Extent(0, 0, 2, 0),)), Row(1, 4, 8, (Extent(0, 2, 4, 4),))], "one ends at 2"),
        (ONE, [Row(0, 0, 4, (Extent(0, 0, 2, 0), Extent(0, 2, 4, 2)))], "two extents of one parameter"),
        (ONE, [Row(0, 0, 2, (Extent(0, 2, 4, 0),)), Row(1, 2, 4, (Extent(0, 0, 2, 2),))], "at 0, got 2"),
    ],
)
def test_a_layout_that_is_no_tiling_cannot_be_made(
    numels: tuple[int, ...], rows: list[Row], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(numels, tuple(rows))


def test_a_capacity_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        assign_buckets(["a"], [4], 0)


@pytest.mark.parametrize(
    ("before", "stops", "offsets", "rooms"),
    [
        # There is padding enough.
        (whole([9, 3], [0, 1], alignment=8), [16, 24], [0, 16], [(0, 9, 13), (1, 19, 23)]),
        # A row without padding grows by whole units.
        (whole([8, 8], [0, 1], alignment=8), [16, 32], [0, 16], [(0, 8, 12), (1, 24, 28)]),
        # A row within one parameter has none: before the begin, behind the end, and the pieces adjoin.
        (
            Layout((24,), rows_in_order([24], [0, 1, 2], [8, 16, 24], alignment=8)),
            [16, 24, 40],
            [8, 16, 24],
            [(0, 0, 4), (2, 32, 36)],
        ),
        # A row without parameters has none.
        (Layout((8,), (Row(0, 0, 8, (Extent(0, 0, 8, 0),)), Row(1, 8, 16, ()))), [16, 24], [0], [(0, 8, 12)]),
    ],
)
def test_a_room_takes_padding_or_makes_its_row_longer(
    before: Layout, stops: list[int], offsets: list[int], rooms: list[tuple[int, int, int]]
) -> None:
    layout = with_rooms(before, 4, alignment=8)
    assert [row.stop for row in layout.rows] == stops
    assert [extent.offset for row in layout.rows for extent in row.extents] == offsets
    assert list(map(tuple, layout.rooms)) == rooms


def test_a_room_over_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="is not in the padding of the row of rank 0"):
        Layout((4,), whole([4], [0]).rows, (Span(0, 2, 4),))


def test_a_room_behind_the_rows_is_sent_by_itself() -> None:
    before = with_rooms(whole([8, 3], [1, 1], alignment=8), 4, alignment=8)
    layout = with_rooms_behind(before, [0, 2], 4, alignment=8)
    assert layout.rows == before.rows
    assert list(map(tuple, layout.rooms)) == [(1, 11, 15), (0, 16, 20), (2, 24, 28)]
    assert (layout.end_of_rows, layout.numel) == (16, 28)
    with pytest.raises(ValueError, match="overlaps what ends at 20"):
        Layout(layout.numels, layout.rows, (*layout.rooms[:2], Span(2, 16, 20)))
