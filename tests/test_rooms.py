"""Rooms for stamps: which ranks are heard by a broadcast of their own."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from zero_optim.plan.plan import make_plan
from zero_optim.shard.store import layouts_with_rooms


def heard_alone(shapes: Sequence[tuple[int, ...]], size: int, *, is_cut: bool, cap_nbytes: int) -> list[int]:
    """The ranks that send a stamp by itself in each step, one for each such broadcast of all buckets."""
    params = [torch.empty(shape, requires_grad=True) for shape in shapes]
    costs = [[float(param.numel()) for param in params]]
    plan = make_plan([params], costs, size, cap_nbytes, bears_cuts=[True] * len(params) if is_cut else None)
    heard: set[int] = set()
    layouts = layouts_with_rooms(plan, params, size, {}, {}, heard)
    assert heard == set(range(size))
    in_rows = {room.owner for layout in layouts for room in layout.rooms if room not in layout.rooms_behind}
    alone = Counter(room.owner for layout in layouts for room in layout.rooms_behind)
    assert not in_rows & set(alone)
    assert all(count == 1 for count in alone.values())
    return sorted(alone)


LARGE, SMALL = (64, 1024), (64,)


@pytest.mark.parametrize("cap_nbytes", [2**10, 2**30])
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_where_each_rank_has_the_end_of_a_parameter_none_sends_a_stamp_by_itself(
    size: int, cap_nbytes: int, *, is_cut: bool
) -> None:
    assert heard_alone([SMALL] * 4 * size, size, is_cut=is_cut, cap_nbytes=cap_nbytes) == []
    assert heard_alone([LARGE, SMALL] * size, size, is_cut=is_cut, cap_nbytes=cap_nbytes) == []


def test_a_rank_sends_its_stamp_by_itself_once_a_step_where_it_has_no_end_of_a_parameter() -> None:
    assert heard_alone([SMALL], 4, is_cut=False, cap_nbytes=2**30) == [1, 2, 3]
    assert heard_alone([LARGE], 4, is_cut=True, cap_nbytes=2**30) == [1, 2]
