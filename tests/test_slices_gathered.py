"""Buckets with many owners are gathered as equal slices, with the bits that owners' broadcasts bring."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parity import trained
from pool import on_ranks
from training import assert_same_bits, params_of, set_grads
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.sending import gather_slices
from zero_optim.plan.slices import Slices
from zero_optim.shard.rows.row_storage import RowStorage

pytestmark = pytest.mark.on_sockets("rows go in one message there")
SHAPES = {"one owner": [(40, 7)], "cut": [(64, 1024)], "ragged": [(33, 3), (5,), (129, 7), (64,), (7, 9, 2)]}


@contextmanager
def as_slices() -> Iterator[None]:
    """Gloo sends as other backends do, as if every bucket had many owners."""
    kind = TRANSPORTS["gloo"]
    with (
        mock.patch.object(kind, "sends_slices", return_value=True),
        mock.patch.object(kind, "waits_on_host", False),
    ):
        yield


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_rows_of_any_lengths_come_to_all_ranks_with_a_header(dtype: torch.dtype) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for lengths in ([5] * size, [100, *[0] * (size - 1)], [7, *[33] * (size - 1)]):
        rows = Slices(rank, tuple(lengths))
        whole = torch.arange(rows.slice * size).to(dtype)
        group = RankGroup.of(None, whole)
        for is_apart in (False, True):  # what this rank sends is not in the tensors that come
            flat, heads = torch.full_like(whole, -1), torch.zeros(size, 4, dtype=torch.uint8)
            own, head = rows.row(flat), heads[rank]
            if is_apart:
                own, head = torch.empty_like(own), torch.empty_like(head)
            own.copy_(rows.row(whole))
            head.fill_(rank + 1)
            apart = own if is_apart else None
            for work in gather_slices(group, flat, rows, "rows", (heads, head), apart):
                work.wait()
            assert torch.equal(flat[: rows.total], whole[: rows.total]), (lengths, is_apart)
            assert heads[:, 0].tolist() == [*range(1, size + 1)]


def steps(shapes: list[tuple[int, ...]], *, view: bool) -> ZeroRedundancyOptimizer:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=view, bucket_cap_mb=0.002
    )
    for number in range(3):
        set_grads(params, number)
        optimizer.step()
        if number == 1:
            optimizer = copy.deepcopy(optimizer)
            params = params_of(optimizer)
    return optimizer


@on_ranks(2, 3)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_has_the_same_bits(kind: str, view: bool) -> None:
    expected = params_of(steps(SHAPES[kind], view=view))
    with as_slices():
        optimizer = steps(SHAPES[kind], view=view)
        assert all(bucket.members.slices is not None for bucket in optimizer.core.engine.buckets)
        assert_same_bits(params_of(optimizer), expected)
        set_grads(params_of(optimizer), 4)
        if dist.get_rank() == 1:
            optimizer.optim.step = mock.Mock(side_effect=ArithmeticError("on purpose"))
        with pytest.raises(ArithmeticError if dist.get_rank() == 1 else RemoteRankError, match="on purpose"):
            optimizer.step()


@on_ranks(2, 3)
def test_units_have_the_same_bits() -> None:
    expected = trained("fully")
    with as_slices(), mock.patch.object(RowStorage, "read", side_effect=AssertionError("a row was copied")):
        assert_same_bits(trained("fully"), expected)
