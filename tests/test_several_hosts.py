"""Ranks of several hosts add up inside a host, and a row crosses once from each. Here hosts are emulated.

On one machine ranks only say that they are on several hosts; benchmarks/overlap.py has hosts with a link.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_optim
from parity import assert_row
from parity_runs import Row
from pool import on_ranks
from rows import start_sum_of
from stalling import TIMEOUT, be_lost, let_go_on, linear, outcomes, sharded, with_gradients
from test_unit_marks import UNEVEN, trained
from training import assert_same_bits
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.comm.traffic import Phase
from zero_optim.ddp import FullyShardedDataParallel
from zero_optim.host.several_hosts import SeveralHosts
from zero_optim.plan.slices import Slices

CPU = torch.device("cpu")


def places(kind: str) -> list[list[int]]:
    """The ranks of each host: `2 x 3` are two hosts of three ranks; `turns`: ranks take turns."""
    if kind == "turns":
        return [[0, 2], [1, 3]]
    hosts, ranks = map(int, kind.split(" x "))
    return [list(range(host * ranks, (host + 1) * ranks)) for host in range(hosts)]


@contextmanager
def on_hosts(kind: str) -> Iterator[RankGroup]:
    """The default group, whose ranks are on several hosts."""
    host = next(number for number, ranks in enumerate(places(kind)) if dist.get_rank() in ranks)
    with mock.patch("zero_optim.host.meeting._host", return_value=f"host {host}"):
        assert zero_optim.share_host_memory()
        group = RankGroup.of(None)
        assert isinstance(group.shared_memory(CPU), SeveralHosts)
        yield group


def rows_of(rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = [(1000, 0, 300_000, 1, 33)[number % 5] for number in range(size)]
    return [torch.randn(length, generator=generator).mul_(100).to(dtype) for length in lengths]


def heads_of(group: RankGroup) -> tuple[Tensor, Tensor]:
    heads = torch.full((group.size, 4), float(group.rank))
    return heads, heads[group.rank]


def assert_came(heads: Tensor) -> None:
    assert torch.equal(heads, torch.arange(float(len(heads))).unsqueeze(1).expand_as(heads))


def added(rows: Sequence[Tensor]) -> Tensor:
    """Rows added one by one; more than two of 16 bits are rounded once."""
    if len(rows) > 2 and rows[0].dtype is torch.bfloat16:
        return added([row.float() for row in rows]).bfloat16()
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


KINDS = ["2 x 2", "turns"]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_to_owners_adds_up_inside_then_across(kind: str, dtype: torch.dtype) -> None:
    with on_hosts(kind) as group:
        everyone = [rows_of(rank, group.size, dtype) for rank in range(group.size)]
        expected = added([added([everyone[rank][group.rank] for rank in here]) for here in places(kind)])
        mine = rows_of(group.rank, group.size, dtype)
        lanes = lanes_beside(group)
        sums = [start_sum_of(group, lanes.groups, mine) for _ in range(2)]
        assert all(torch.equal(each.wait(), expected) for each in sums), (kind, dtype)
        flat, rows = torch.cat(mine), Slices(group.rank, tuple(map(Tensor.numel, mine)))
        assert torch.equal(start_row_sum(group, lanes.groups, flat, rows).wait(), expected)
        mine = list(torch.split(flat, list(rows.rows)))
        others = [row for rank, row in enumerate(mine) if rank != group.rank]
        assert_same_bits(others, [row for rank, row in enumerate(everyone[group.rank]) if rank != group.rank])


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_owners_reach_all_and_a_sum_is_equal_on_all(kind: str) -> None:
    with on_hosts(kind) as group:
        everyone = [rows_of(rank, group.size, torch.float32) for rank in range(group.size)]
        rows = [(owner, everyone[owner][place]) for place in (0, 2, 3) for owner in range(group.size)]
        arrivals = [
            (owner, row.clone() if owner == group.rank else torch.zeros_like(row)) for owner, row in rows
        ]
        heads = heads_of(group), heads_of(group)
        works = [
            *group.broadcast_rows(arrivals[:3]),
            *group.broadcast_rows(arrivals[3:6], "", heads[0], 5),
            *group.broadcast_rows(arrivals[6:9]),
            *group.broadcast_rows(arrivals[9:], "", heads[1], 5),
        ]
        for dtype in (torch.float32, torch.float64, torch.complex64):
            for shape in ((1,), (3,), (10, 100), (300_001,)):
                total = torch.full(shape, 1 + group.rank, dtype=dtype)
                total = total.T if total.dim() > 1 and group.rank else total
                summed = group.start_sum(total)
                work: Any = summed._works[0]
                (call,) = work.handles
                assert summed.wait() is total
                assert torch.equal(total, torch.full_like(total, sum(range(1, group.size + 1))))
                sent = group.all_gather_json(call.nbytes)
                assert sum(sent) == 2 * (group.size - 1) * total.nbytes
        for work in works:
            work.wait()
        assert_same_bits([row for _, row in arrivals], [row for _, row in rows], kind)
        assert_came(heads[0][0])
        assert_came(heads[1][0])


@on_ranks(4)
def test_a_row_crosses_once_from_each_host() -> None:
    with on_hosts("2 x 2") as group:
        lanes = lanes_beside(group).groups  # made before, as that crosses too
        with mock.patch("torch.distributed.isend", side_effect=dist.isend) as sends:
            rows = [torch.ones(1000) for _ in range(4)]
            counted = replace(lanes[0], phase=Phase())
            start_sum_of(counted, [counted], rows).wait()
            for work in counted.broadcast_rows(list(enumerate(rows))):
                work.wait()
            counted.start_sum(torch.ones(4000)).wait()
            for work in counted.broadcast_rows(list(enumerate(rows)), "", heads_of(group), 1):
                work.wait()
        nbytes = [each.args[0].nbytes for each in sends.call_args_list]  # of this rank
        assert nbytes == [4000, 4000, 4000, 4000, 8, 16, 4000]  # a tag and a head before the last
        # Two rows to the other rank of this host, and one across; and so back. A sum is both.
        sent = sum(each["sent_bytes"] for each in counted.phase.traffic.counts.values())
        assert sent == 2 * 24_000 + 12_000 + 3 * 16


@on_ranks(4)
@pytest.mark.parametrize("tags", [(1, 2, 1, 2), (1, 1, 2, 2)])
def test_of_rows_with_other_tags_the_heads_come_and_the_next_call_goes_on(tags: tuple[int, ...]) -> None:
    with on_hosts("2 x 2") as group:
        tag, heads = tags[group.rank], heads_of(group)
        rows = [(owner, torch.ones(1000 * tag)) for owner in range(4)]
        for work in group.broadcast_rows(rows, "", heads, tag):
            work.wait()
        assert_came(heads[0])
        total = torch.ones(1000)
        group.start_sum(total).wait()
        assert torch.equal(total, torch.full((1000,), 4.0))


RECIPES = "lazy", "overlap", "gradients, lazy", "fully"


@on_ranks(4)
@pytest.mark.parametrize("stage", RECIPES)
def test_every_recipe_trains_with_sums_inside_hosts_then_across(stage: str) -> None:
    with on_hosts("2 x 2"):
        for loop in ("ordinary",) if "overlap" in stage else ("ordinary", "clipped"):
            assert_row(Row(stage, "tower", loop, "hosts"))


@on_ranks(3)
def test_hosts_with_other_numbers_of_ranks_go_through_sockets() -> None:
    host = f"host {dist.get_rank() // 2}"
    with (
        mock.patch("zero_optim.host.meeting._host", return_value=host),
        pytest.warns(UserWarning, match="the ranks are on several hosts, and not as many on each"),
    ):
        assert not zero_optim.share_host_memory()


def step_without_one(how: str) -> str:
    with on_hosts("2 x 2"):
        model = with_gradients(linear())
        optimizer = sharded(model)
        optimizer.step()
        if dist.get_rank() == 3:
            be_lost(how)
        optimizer.step()
        return "stepped"


def gather_without_one(how: str) -> str:
    with on_hosts("2 x 2"):
        model = linear()
        optimizer = sharded(model)
        wrapped = FullyShardedDataParallel(model, optimizer, units=[*model], timeout=TIMEOUT)
        wrapped(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if dist.get_rank() == 3:
            be_lost(how)
        wrapped(torch.ones(1, 4))
        return "gathered"


@pytest.mark.parametrize(
    ("without_one", "how", "reason"),
    [
        (step_without_one, "killed", "rank 3 has ended"),
        (gather_without_one, "stopped", "rank 3 does not answer"),
    ],
)
def test_who_is_missing_is_named_on_every_host(
    without_one: Callable[[str], str], how: str, reason: str
) -> None:
    meanwhile = let_go_on if how == "stopped" else None
    ended = outcomes(4, without_one, how, meanwhile=meanwhile)
    for rank, outcome in enumerate(ended[:3]):
        assert str(outcome.said).startswith("StalledError: stalled"), (rank, ended)
        assert reason in str(outcome.said), (rank, ended)


def call_another_unit() -> str:
    with on_hosts("2 x 2") as group:
        wrapped, _, _ = trained(UNEVEN)
        block = wrapped.module.blocks[group.rank % 2]
        with torch.no_grad(), pytest.raises(zero_optim.RankMismatchError) as error:
            block(torch.ones(2, 8))
        total = torch.ones(1000)
        group.start_sum(total).wait()
        return f"{error.value}; then {total.sum():g}"


def test_ranks_that_gather_different_units_are_told() -> None:
    for outcome in outcomes(4, call_another_unit):
        assert outcome.exitcode == 0, outcome
        for part in ("unit blocks.0", "unit blocks.1", "; then 4000"):
            assert part in str(outcome.said), (part, outcome)
