"""`Slices` computes which part of a bucket each rank reduces, and which parts of it belong to whose row."""

import pytest
import torch

from zero_optim.plan.slices import UNIT, Slices, stripes_of

ROWS = [(0,), (5,), (4, 4), (3, 5), (0, 100, 0), (40, 0, 0), (17, 33, 1, 0, 7), (0, 0)]


@pytest.mark.parametrize("rows", ROWS)
def test_slices_and_rows_share_each_element_once(rows: tuple[int, ...]) -> None:
    every = [Slices(rank, rows) for rank in range(len(rows))]
    length, total = every[0].slice, sum(rows)
    assert length * len(rows) >= total
    of_slices = [slices.splits[0] for slices in every]
    of_rows = [slices.splits[1] for slices in every]
    assert list(zip(*of_slices, strict=True)) == of_rows
    assert [sum(parts) for parts in of_rows] == list(rows)
    used = [max(0, min(total, length * (rank + 1)) - length * rank) for rank in range(len(rows))]
    assert [sum(parts) for parts in of_slices] == used


# On hosts of two ranks: a host has all, or most; even rows, nearly even ones, none.
ON_HOSTS = [(9, 0, 0, 0), (70, 33, 1, 0, 0, 5), (4, 4, 4, 4), (500, 499) * 3, (0,) * 4, (100, *[0] * 19)]


@pytest.mark.parametrize("rows", ON_HOSTS)
def test_slices_on_hosts_share_each_element_with_rows_once(rows: tuple[int, ...]) -> None:
    every = [stripes_of(Slices(rank, rows), 2) for rank in range(len(rows))]
    of_slices, of_rows = ([each.splits[side] for each in every] for side in (0, 1))
    assert list(zip(*of_slices, strict=True)) == of_rows
    assert [sum(parts) for parts in of_rows] == list(rows)
    others = len(rows) // 2 - 1  # of which a rank receives, at most a bucket
    assert others * max(every[0].parts) <= 1.02 * sum(rows) + others * UNIT


@pytest.mark.parametrize("rows", ON_HOSTS)
def test_what_is_gathered_by_stripes_is_the_bucket(rows: tuple[int, ...]) -> None:
    stripes, total = stripes_of(Slices(0, rows), 2), sum(rows)
    flat = torch.arange(max(total, sum(stripes.parts)))
    parts = [list(torch.split(flat, [*stripes.parts]))[number::2] for number in range(2)]
    assert torch.equal(stripes.packed(flat), torch.cat([*parts[0], *parts[1]]))
    gathered = torch.full((2, sum(stripes.lengths)), -1)
    for number in range(2):
        places = torch.split(gathered[number], stripes.lengths)
        for place, part in zip(places, parts[number], strict=True):
            place[: len(part)] = part
    got = torch.full_like(flat, -1)
    stripes.unpack(gathered.view(-1), got)
    assert torch.equal(got[:total], flat[:total])
