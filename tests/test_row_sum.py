"""Sums of rows: the order and dtype of additions, and the memory that rows of uneven lengths take."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity import assert_row
from parity_runs import Row
from pool import on_ranks
from rows import start_sum_of
from streams_runs import assert_ordered
from test_sharded_memory import LivingStorages
from test_streams_runs import RUNS
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import row_sum
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.ddp import ShardedDataParallel
from zero_optim.plan.slices import Slices


@contextlib.contextmanager
def exchanging(*, at_once: bool = False) -> Iterator[None]:
    """Exchange on gloo, if ``at_once``, by one all-to-all as on other backends."""
    with mock.patch.object(TRANSPORTS["gloo"], "sends_pairs", not at_once):
        yield


# ---------------------------------------------------------------------- order and dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_16_bits_over_many_ranks_is_rounded_once(dtype: torch.dtype) -> None:
    size = 1024
    value = torch.tensor([0.1 / size, 0.3, -7.0]).div(size).to(dtype)
    total = torch.empty_like(value)
    row_sum._add([value.clone() for _ in range(size)], 3, total)
    assert torch.equal(total, (value.float() * size).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize(
    ("world", "length"), [(3, 40_000), (18, 20_001), (200, 7), (1024, 48), (2, 5), (5, 0)]
)
def test_rows_added_at_once_have_the_bits_of_additions(dtype: torch.dtype, world: int, length: int) -> None:
    rows = torch.randn(world, length, generator=torch.Generator().manual_seed(0)).mul_(100).to(dtype)
    expected = torch.empty(length, dtype=dtype)
    row_sum._add([row.clone() for row in rows], 0, expected)
    came = torch.cat([rows.view(-1), torch.full((row_sum._WIDTH,), 7).to(dtype)])
    assert torch.equal(row_sum._add_at_once(came, world), expected)


class Launches(TorchDispatchMode):
    """Counts operators that are a launch on an accelerator."""

    VIEWS = ("view", "slice", "as_strided", "new_empty")
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.overloadpacket.__name__.startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "length"), [(8, 2**17), (1024, 2**10), (7, 2**17 + 1)])
def test_a_sum_is_one_launch_for_any_number_of_ranks(dtype: torch.dtype, world: int, length: int) -> None:
    came = torch.zeros(world * length + row_sum._WIDTH, dtype=dtype)
    row_sum._add_at_once(came, world)  # which makes an index
    with Launches() as launches:
        row_sum._add_at_once(came, world)
    assert launches.count == 1


@on_ranks(3)
def test_three_ranks_add_16_bits_in_float32() -> None:
    """In bf16 each of two additions of 1 to 256 would be lost."""
    group = RankGroup.of(None)
    rows = [torch.full((2,), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16) for _ in range(3)]
    assert start_sum_of(group, [group], rows).wait().tolist() == [258.0, 258.0]


# ---------------------------------------------------------------------- rows of uneven lengths


LENGTHS = ((7, 0, 41, 3), (0, 0, 0, 500), (300, 1, 290, 4), (5, 5, 5, 5))


@on_ranks(4)
@pytest.mark.parametrize(("at_once", "by_thread"), [(False, False), (False, True), (True, False)])
def test_rows_of_uneven_lengths_have_the_sums_of_even_ones(at_once: bool, by_thread: bool) -> None:
    """Several sums under way; a thread waits for them while others are started."""
    group = RankGroup.of(None)
    lanes = lanes_beside(group)

    def value(rank: int, number: int, length: int) -> Tensor:
        return torch.randn(length, generator=torch.Generator().manual_seed(100 * number + rank))

    totals: list[Tensor] = []
    with exchanging(at_once=at_once):
        sums = []
        threads = []
        for number, lengths in enumerate(LENGTHS * 5):
            rows = [value(group.rank, number, length) for length in lengths]
            sums.append(start_sum_of(group, lanes.groups, rows))
            if by_thread and number == 2:
                threads.append(threading.Thread(target=lambda: totals.extend(s.wait() for s in sums[:3])))
                threads[0].start()
        for thread in threads:
            thread.join()
        totals += [each.wait() for each in sums[len(totals) :]]
    for number, (total, lengths) in enumerate(zip(totals, LENGTHS * 5, strict=True)):
        expected = value(0, number, lengths[group.rank])
        for rank in range(1, group.size):
            expected = expected + value(rank, number, lengths[group.rank])
        assert torch.equal(total, expected), number


NBYTES = 2**20  # of a matrix


@pytest.mark.on_sockets("rows go whole there, and are added up in the rings")
@on_ranks(4)
def test_a_pass_with_whole_matrices_holds_no_copy_for_each_rank() -> None:
    """Each bucket is one matrix, which one rank owns."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.1, cuts=False, bucket_cap_mb=1
    )
    wrapped = ShardedDataParallel(module, optimizer)
    loss = wrapped(torch.ones(1, 512)).square().mean()
    with LivingStorages(module.parameters()) as living:
        loss.backward()
    # What it owns, two buckets, what comes of one, a gradient, a slice of the last.
    assert living.peak / NBYTES < 5.3, living.peak / NBYTES


# By one all-to-all only where no thread starts sums, as on other backends.
@on_ranks(4)
@pytest.mark.parametrize("at_once", [False, True])
def test_sharded_gradients_have_the_same_bits_by_sums_of_slices(at_once: bool) -> None:
    with exchanging(at_once=at_once), mock.patch.object(Slices, "is_direct", False):
        assert_row(Row("gradients", "tower", "ordinary", "four ranks"))


@pytest.mark.on_sockets("an accelerator takes no part in it")
@on_ranks(3)
@pytest.mark.parametrize("at_once", [True, False])
def test_sums_of_slices_are_ordered_on_an_accelerator(at_once: bool) -> None:
    """On the model of streams slices are summed, and brought to owners, beside the backward pass."""
    with exchanging(at_once=at_once), mock.patch.object(Slices, "is_direct", False):
        assert_ordered(**RUNS["sharded gradients, two streams in a model"])
