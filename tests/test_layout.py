"""Properties of partition, layout and buckets on random inputs."""

import random

import pytest

from zero_optim.plan.buckets import assign_buckets
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
from zero_optim.plan.partition import assign_owners, rank_loads

SEEDS = range(60)


def random_groups(rng: random.Random) -> list[list[int]]:
    """Some groups of costs, with many ties, zeros and a few giants."""
    kinds = (lambda: rng.randint(0, 3), lambda: rng.randint(1, 1000), lambda: rng.choice([7, 7, 10**6]))
    return [[rng.choice(kinds)() for _ in range(rng.randint(0, 30))] for _ in range(rng.randint(1, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_has_an_owner_and_no_rank_is_further_above_another_than_one_item(seed: int) -> None:
    rng = random.Random(seed)
    groups, num_ranks = random_groups(rng), rng.randint(1, 9)
    owners = assign_owners(groups, num_ranks)
    assert [len(o) for o in owners] == [len(g) for g in groups]
    costs = [cost for group in groups for cost in group]
    loads = rank_loads(costs, [o for group in owners for o in group], num_ranks)
    assert sum(loads) == sum(costs)
    # Whoever is fullest was least loaded when its last item came.
    assert max(loads) - min(loads) <= max(costs, default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_adding_a_group_moves_no_owner(seed: int) -> None:
    rng = random.Random(seed)
    groups, num_ranks = random_groups(rng), rng.randint(1, 9)
    whole_owners = assign_owners(groups, num_ranks)
    loads = [0.0] * num_ranks
    for group, expected in zip(groups, whole_owners, strict=True):
        (owners,) = assign_owners([group], num_ranks, loads)
        assert owners == expected
        loads = [a + b for a, b in zip(loads, rank_loads(group, owners, num_ranks), strict=True)]


def test_one_group_is_within_four_thirds_of_the_mean_when_no_item_is_large() -> None:
    rng = random.Random(1)
    for num_ranks in (2, 3, 8, 64):
        costs = [rng.randint(50, 100) for _ in range(num_ranks * 4)]
        (owners,) = assign_owners([costs], num_ranks)
        loads = rank_loads(costs, owners, num_ranks)
        assert max(loads) <= 4 / 3 * sum(loads) / num_ranks


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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_layout_tiles_every_parameter_once_and_aligned(seed: int) -> None:
    rng = random.Random(seed)
    numels = [rng.choice([0, 1, 5, 16, 33]) for _ in range(rng.randint(1, 20))]
    num_ranks, alignment = rng.randint(1, 6), rng.choice([1, 8, 16])
    owners = [rng.randrange(num_ranks) for _ in numels]
    layout = whole(numels, owners, alignment)
    places = [range(extent.offset, extent.end) for row in layout.rows for extent in row.extents]
    covered = [element for place in places for element in place]
    assert len(covered) == len(set(covered)) == sum(numels)
    assert all(0 <= element < layout.numel for element in covered)
    for row in layout.rows:
        assert row.start % alignment == 0
        for extent in row.extents:
            assert owners[extent.param] == row.owner
            assert (extent.start, extent.stop) == (0, numels[extent.param])
            assert extent.offset % alignment == 0
            assert row.start <= extent.offset
            assert extent.end <= row.stop
    assert [row.owner for row in layout.rows] == sorted(set(owners))
    assert layout.numel < sum(numels) + alignment * len(numels) + 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(0, 0, 4, (Extent(0, 0, 4, 0),))], "parameter 1 of the bucket: 0 of its 2"),
        ([Row(0, 0, 6, (Extent(0, 0, 4, 0), Extent(1, 0, 2, 3)))], "overlaps"),
        ([Row(0, 0, 5, (Extent(0, 0, 4, 0), Extent(1, 0, 2, 4)))], "behind its row's end 5"),
        (
            [Row(0, 0, 4, (Extent(0, 0, 4, 0),)), Row(1, 5, 7, (Extent(1, 0, 2, 5),))],
            "expected to start at 4",
        ),
        ([Row(1, 0, 4, (Extent(0, 0, 4, 0),)), Row(0, 4, 6, (Extent(1, 0, 2, 4),))], "rising rank"),
        ([Row(0, 0, 8, (Extent(0, 0, 4, 0), Extent(0, 0, 2, 4), Extent(1, 0, 2, 6)))], "start at 2, got 0"),
        ([Row(0, 0, 6, (Extent(0, 0, 4, 0), Extent(1, 1, 2, 4)))], "start at 0, got 1"),
    ],
)
def test_a_layout_that_is_no_tiling_cannot_be_made(rows: list[Row], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout((4, 2), tuple(rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_buckets_hold_each_parameter_once_one_key_each_within_the_cap(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(0, 40)
    keys = [rng.choice("abc") for _ in range(count)]
    nbytes = [rng.randint(0, 100) for _ in range(count)]
    cap = rng.choice([1, 50, 120, 10**6])
    buckets = assign_buckets(keys, nbytes, cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(count))
    for bucket in buckets:
        assert len({keys[index] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(nbytes[index] for index in bucket) <= cap
        assert bucket == sorted(bucket, reverse=True)
    if cap == 10**6:
        assert len(buckets) == len(set(keys))


def test_a_capacity_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        assign_buckets(["a"], [4], 0)


def rooms_of(layout: Layout) -> list[tuple[int, int, int]]:
    return [tuple(room) for room in layout.rooms]


def test_a_room_takes_padding_where_there_is_enough() -> None:
    before = whole([9, 3], [0, 1], alignment=8)
    layout = with_rooms(before, 4, alignment=8)
    assert layout.rows == before.rows
    assert rooms_of(layout) == [(0, 9, 13), (1, 19, 23)]


def test_a_row_without_padding_grows_by_whole_units() -> None:
    layout = with_rooms(whole([8, 8], [0, 1], alignment=8), 4, alignment=8)
    assert [(row.start, row.stop, row.extents[0].offset) for row in layout.rows] == [(0, 16, 0), (16, 32, 16)]
    assert rooms_of(layout) == [(0, 8, 12), (1, 24, 28)]


def test_a_row_within_one_parameter_has_no_room() -> None:
    rows = rows_in_order([24], [0, 1, 2], [8, 16, 24], alignment=8)
    layout = with_rooms(Layout((24,), rows), 4, alignment=8)
    assert rooms_of(layout) == [(0, 0, 4), (2, 32, 36)], "before the begin, behind the end"
    offsets = [extent.offset for row in layout.rows for extent in row.extents]
    assert offsets == [8, 16, 24], "the pieces follow each other"


def test_a_room_over_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="is not in the padding of the row of rank 0"):
        Layout((4,), whole([4], [0]).rows, (Span(0, 2, 4),))


def test_a_room_behind_the_rows_is_sent_by_itself() -> None:
    before = with_rooms(whole([8, 3], [1, 1], alignment=8), 4, alignment=8)
    layout = with_rooms_behind(before, [0, 2], 4, alignment=8)
    assert layout.rows == before.rows
    assert rooms_of(layout) == [(1, 11, 15), (0, 16, 20), (2, 24, 28)]
    assert (layout.end_of_rows, layout.numel) == (16, 28)
    with pytest.raises(ValueError, match="overlaps what ends at 20"):
        Layout(layout.numels, layout.rows, (*layout.rooms[:2], Span(2, 16, 20)))
