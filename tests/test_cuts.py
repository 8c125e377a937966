"""Rows that are even in every bucket: owners bucket by bucket, and parameters cut between rows."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn import draw_the_same
from zero_optim.dtensor.placement import chunk_pieces
from zero_optim.plan import cuts
from zero_optim.plan.costs import matmul_cost
from zero_optim.plan.pieces import num_rows
from zero_optim.plan.plan import Plan, make_plan, make_plan_beside

draw_the_same()

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 5000)),
        st.tuples(st.integers(0, 300), st.integers(0, 70)),
        st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=12,
)
sizes_of_ranks = st.integers(1, 9)


def meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(
    groups: list[list[Tensor]],
    num_ranks: int,
    cap: int,
    bears: bool | None,
    loads: list[float] | None = None,
    **more: Any,
) -> Plan:
    costs = [[p.numel() for p in group] for group in groups]
    flags = None if bears is None else [bears] * sum(map(len, groups))
    return make_plan(groups, costs, loads or [0] * num_ranks, cap, bears_cuts=flags, **more)


# ---------------------------------------------------------------------- plans


@given(shapes, sizes_of_ranks, st.sampled_from([1, 4000, 10**9]), st.sampled_from(["float32", "bfloat16"]))
def test_a_plan_gives_every_row_to_one_rank_and_evens_out_buckets_and_the_model(
    shapes: list[tuple[int, ...]], num_ranks: int, cap: int, dtype: str
) -> None:
    params = [meta(shape, getattr(torch, dtype)) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "MIN_ROW_NBYTES", 1024)
        plan, again = (plan_of([params], num_ranks, cap, bears=True) for _ in range(2))
        more = plan_of([params], num_ranks, cap, bears=True, loads=plan.loads(num_ranks))
        uncut = plan_of([params], num_ranks, cap, bears=False)
    assert plan == again
    assert not uncut.is_cut
    assert_places(plan, params, num_ranks)
    assert_places(more, params, num_ranks)  # an added group counts what is there
    if dtype == "float32" and cap > 1:
        assert_even_buckets(plan, params, num_ranks)
    before = plan_of([params], num_ranks, cap, bears=None).loads(num_ranks)
    # A cut is at most half a step from where it should be, and 128 rows are a step of any parameter.
    step = max(128 * max(1, shape.numel() // max(1, num_rows(shape))) for shape in map(torch.Size, shapes))
    for made, allowed in ((plan, step), (uncut, 0)):
        loads = made.loads(num_ranks)
        assert max(loads) <= max(1.05 * sum(loads) / num_ranks, *before) + allowed


def assert_places(plan: Plan, params: list[Tensor], num_ranks: int) -> None:
    """Each rank has one piece of a parameter at most, at an aligned place of its row of a bucket."""
    for param, pieces in zip(params, plan.pieces, strict=True):
        assert pieces[0].start == 0
        assert pieces[-1].stop == num_rows(param.shape)
        for before, after in pairwise(pieces):
            assert before.stop == after.start
            assert before.owner < after.owner
        assert all(0 <= piece.owner < num_ranks for piece in pieces)
    for bucket in plan.buckets:
        for row in bucket.layout.rows:
            for extent in row.extents:
                param = params[bucket.params[extent.param]]
                width = param.numel() // max(1, num_rows(param.shape))
                piece = next(p for p in plan.pieces[bucket.params[extent.param]] if p.owner == row.owner)
                assert (piece.start * width, piece.stop * width) == (extent.start, extent.stop)
                assert extent.offset * param.element_size() % 64 == 0 or param.device.type != "cpu"


def assert_even_buckets(plan: Plan, params: list[Tensor], num_ranks: int) -> None:
    """No row of what may be cut is far above the mean; of float32."""
    for bucket in plan.buckets:
        fullest = max(sum(e.stop - e.start for e in row.extents) for row in bucket.layout.rows) * 4
        mean = 4 * sum(bucket.layout.numels) / num_ranks
        widths = [params[i].numel() // max(1, num_rows(params[i].shape)) for i in bucket.params]
        # With rows of odd lengths, every 128th begins at an aligned place.
        assert fullest <= mean + max(2 * 1024, 0.05 * mean) + 512 * max(widths) + 1024


def test_a_large_embedding_is_shared_by_all_ranks() -> None:
    params = [meta((64_000, 64)), *[meta((4_000, 64)) for _ in range(4)]]
    before = plan_of([params], 2, 32 * 2**20, bears=None).loads(2)
    plan = plan_of([params], 2, 32 * 2**20, bears=True)
    loads = plan.loads(2)
    assert max(before) / (sum(before) / 2) > 1.5
    assert max(loads) / (sum(loads) / 2) <= 1.01
    assert [piece.owner for piece in plan.pieces[0]] == [0, 1]
    # Loads from before choose who gets rows.
    loads = [5.0] * 8 + [0.0] * 8
    plan = plan_of([[meta((1024, 128))]], 16, 10**9, bears=True, loads=loads)  # 512 KiB: eight rows
    assert [piece.owner for piece in plan.pieces[0]] == list(range(8, 16))


def test_what_bears_no_cuts_is_whole_and_in_other_buckets() -> None:
    params = [meta((4_000, 64)), meta((64_000, 64)), meta((4_000, 64)), meta((64_000, 64))]
    groups, costs = [params[:2], params[2:]], [[1.0, 16.0], [1.0, 16.0]]
    plan = make_plan(groups, costs, [0] * 4, 10**9, bears_cuts=[True, True, False, False])
    assert sorted(sorted(bucket.params) for bucket in plan.buckets) == [[0, 1], [2, 3]]
    assert all(len(plan.pieces[index]) == 1 for index in (2, 3))
    assert any(len(plan.pieces[index]) > 1 for index in (0, 1))


# Shapes of a Llama model of 7 G elements, and of GPT-2.
LLAMA_LAYER = [(4096,), *[(4096, 4096)] * 4, (4096,), *[(11008, 4096)] * 2, (4096, 11008)]
LLAMA = [(32000, 4096), *LLAMA_LAYER * 32, (4096,), (32000, 4096)]
GPT2_LAYER = [(768,), (768, 2304), (2304,), (768, 768), *[(768,)] * 4, *[(768, 3072)] * 2, (3072,)]
GPT2 = [(50257, 768), (1024, 768), *GPT2_LAYER * 12, (1536,)]


@pytest.mark.parametrize("row_nbytes", [2**20, 2**18])
@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
@pytest.mark.parametrize("name", ["7 B", "7 B in units", "GPT-2"])
def test_large_models_are_even_with_few_owners_that_follow_from_bucket_to_bucket(
    name: str, num_ranks: int, row_nbytes: int
) -> None:
    shapes, dtype = (GPT2, torch.float32) if name == "GPT-2" else (LLAMA, torch.bfloat16)
    params: list[Tensor] = [meta(shape, dtype) for shape in shapes]
    units = [0, *(1 + place // 9 for place in range(32 * 9)), 0, 0] if name == "7 B in units" else None
    plan = plan_of([params], num_ranks, 2**25, bears=True, units=units, row_nbytes=row_nbytes)
    loads = plan.loads(num_ranks)
    assert max(loads) <= 1.05 * sum(loads) / num_ranks
    assert len(plan.buckets) == {"7 B": 226, "7 B in units": 33, "GPT-2": 10}[name]
    row = min(row_nbytes, sum(param.nbytes for param in params) // (4 * num_ranks))
    for bucket in plan.buckets:
        nbytes, owners = bucket.layout.numel * dtype.itemsize, {r.owner for r in bucket.layout.rows}
        assert len(owners) <= min(num_ranks, -(-nbytes // row) + 1)  # one of them has the rest of its turn
        assert sum((owner + 1) % num_ranks not in owners for owner in owners) <= 1  # consecutive


@pytest.mark.parametrize(
    "layers", [[shape for shape in LLAMA_LAYER if len(shape) == 2] * 32, GPT2_LAYER * 12]
)
def test_owners_over_rows_of_others_share_the_cost_of_newton_schulz(layers: list[tuple[int, ...]]) -> None:
    params = [meta(shape) for shape in layers if len(shape) == 2]
    costs = list(map(matmul_cost, params))
    rows = [chunk_pieces(param.shape[0], 8) for param in params]
    plan = make_plan_beside(rows, [params], [costs], [0.0] * 8, 2**25, None, 2**20)
    loads = plan.loads(8)
    assert max(loads) <= 1.05 * sum(loads) / 8
    assert all(len(pieces) == 1 for pieces in plan.pieces)
