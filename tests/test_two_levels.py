"""Where a group spans hosts, sums go inside a host, then across; gathers go back. Here hosts are pretended.

Other backends than gloo do this in `zero_optim.comm.sending`, gloo in `zero_optim.host.several_hosts`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import test_several_hosts as in_memory
from parity import assert_row
from parity_runs import Row, Run, Stage
from pool import on_ranks
from rows import start_sum_of
from streams_runs import Run as RunOnStreams
from streams_runs import assert_ordered
from test_several_hosts import RECIPES, added, places
from test_streams_runs import LOOPS, STAGES
from training import assert_same_bits
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.comm import collectives
from zero_optim.comm.backends import TRANSPORTS
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.hosts import find_hosts
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.comm.sending import gather_slices
from zero_optim.ddp import DistributedDataParallel
from zero_optim.host.meeting import Met
from zero_optim.plan.slices import Slices

CPU = torch.device("cpu")
# Rows of any lengths: even ones, nearly even ones, of one owner, of a few, some without any.
LENGTHS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda size: [48] * size,
    "nearly even": lambda size: [500 - rank % 2 for rank in range(size)],
    "one owner": lambda size: [0] * (size - 1) + [1000],
    "few owners": lambda size: [700, 300, *[0] * (size - 2)],
    "ragged": lambda size: [(1000, 0, 30_000, 1, 33)[rank % 5] for rank in range(size)],
    "nothing": lambda size: [0] * size,
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@contextmanager
def on_hosts(kind: str) -> Iterator[RankGroup]:
    """The default group, whose ranks are on several hosts, and gloo is to the library as NCCL is."""
    host = next(number for number, ranks in enumerate(places(kind)) if dist.get_rank() in ranks)
    gloo, answers = TRANSPORTS["gloo"], ("shares_host_memory", "waits_on_host", "sends_pairs")
    with ExitStack() as patches:
        for answer in answers:
            patches.enter_context(mock.patch.object(gloo, answer, False))
        patches.enter_context(mock.patch.object(gloo, "sends_slices", return_value=True))
        patches.enter_context(mock.patch("zero_optim.host.meeting._host", return_value=f"host {host}"))
        yield found_again()


def found_again() -> RankGroup:
    group = RankGroup.of(None, torch.ones(1))
    group.works.met = None
    find_hosts(group)
    return group


def rows_of(rank: int, lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(length, generator=generator).mul_(100).to(dtype) for length in lengths]


def check_sums_and_gathers(kind: str) -> None:
    with on_hosts(kind) as group:
        assert group.levels(CPU) is not None
        for (name, lengths_of), dtype in product(LENGTHS.items(), DTYPES):
            lengths = lengths_of(group.size)
            everyone = [rows_of(rank, lengths, dtype) for rank in range(group.size)]
            sums = [
                added([added([everyone[rank][owner] for rank in here]) for here in places(kind)])
                for owner in range(group.size)
            ]
            total = start_sum_of(group, [group], everyone[group.rank]).wait()
            assert torch.equal(total, sums[group.rank]), (name, dtype)
            rows = Slices(group.rank, tuple(lengths))
            flat, heads = torch.zeros(rows.slice * group.size, dtype=dtype), torch.zeros(group.size, 4)
            rows.row(flat).copy_(sums[group.rank])
            heads[group.rank] = group.rank + 1
            octets = heads.view(torch.uint8)
            for work in gather_slices(group, flat, rows, "rows", (octets, octets[group.rank])):
                work.wait()
            assert_same_bits([flat[: rows.total]], [torch.cat(sums)], (name, dtype))
            assert heads[:, 0].tolist() == [*range(1, group.size + 1)]


@on_ranks(4)
def test_sums_have_the_order_of_hosts_and_gathers_bring_them_to_all() -> None:
    check_sums_and_gathers("2 x 2")


@pytest.mark.slow
@on_ranks(6)
@pytest.mark.parametrize("kind", ["2 x 3", "3 x 2"])
def test_sums_and_gathers_of_more_ranks(kind: str) -> None:
    check_sums_and_gathers(kind)


# ---------------------------------------------------------------------- bytes


class Over(dist.Work):
    """A collective of a fake group."""

    def wait(self, *_: object) -> bool:
        return True


@contextmanager
def counting(host_of: Callable[[int], int]) -> Iterator[dict[str, int]]:
    """Counts the bytes that this rank's calls send to other hosts; what rings pass on goes once to each."""
    count = {"bytes": 0}
    calls = {name: getattr(dist, name) for name in (collectives.GATHER, "broadcast")}

    def elsewhere(group: dist.ProcessGroup) -> list[bool]:
        return [host_of(rank) != host_of(dist.get_rank()) for rank in dist.get_process_group_ranks(group)]

    def exchange(into: Tensor, sent: Tensor, back: list[int], there: list[int], **named: Any) -> Any:
        count["bytes"] += sum(
            length for length, is_out in zip(there, elsewhere(named["group"]), strict=True) if is_out
        )
        assert (sum(there), sum(back)) == (sent.nbytes, into.nbytes)
        return Over()  # a fake group refuses to send nothing and receive something

    def gather(into: Tensor, mine: Tensor, **named: Any) -> Any:
        count["bytes"] += mine.nbytes * sum(elsewhere(named["group"]))
        return calls[collectives.GATHER](into, mine, **named)

    def broadcast(row: Tensor, **named: Any) -> Any:
        is_source = dist.get_rank(named["group"]) == named["group_src"]
        count["bytes"] += is_source * row.nbytes * sum(elsewhere(named["group"]))
        return calls["broadcast"](row, **named)

    ours = {"all_to_all_single": exchange, collectives.GATHER: gather, "broadcast": broadcast}
    with mock.patch.multiple(dist, **ours):
        yield count


def crossing(hosts: int, here: int, buckets: list[list[int]]) -> list[int]:
    """Bytes that each host sends to others, for sums and gathers of some buckets."""
    size, nbytes = hosts * here, [0] * hosts
    table = [list(range(host * here, (host + 1) * here)) for host in range(hosts)]
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            with (
                mock.patch.object(Met, "by", return_value=Met(table, "", "zero_optim:fake")),
                counting(lambda rank: rank // here) as count,
            ):
                group = RankGroup.of(None, torch.ones(1))
                find_hosts(group)
                count["bytes"] = 0
                for lengths in buckets:
                    rows = Slices(rank, tuple(lengths))
                    flat = torch.zeros(rows.slice * size)
                    start_row_sum(group, [group], flat, rows).wait()
                    for work in gather_slices(group, flat, rows):
                        work.wait()
                nbytes[rank // here] += count["bytes"]
        finally:
            dist.destroy_process_group()
    return nbytes


@pytest.mark.parametrize(("hosts", "here"), [(2, 8), (4, 4)])
def test_a_host_sends_each_byte_once(hosts: int, here: int) -> None:
    size = hosts * here
    firsts = range(0, size, here // 2)  # so that hosts own as much
    few = [[4000 * (0 <= (rank - first) % size < 5) for rank in range(size)] for first in firsts]
    one = [[9000 * (rank == first) for rank in range(size)] for first in firsts]
    for buckets in ([[2000] * size], [[2000 - rank % 2 for rank in range(size)]], few, one):
        nbytes = 4 * sum(map(sum, buckets))
        for sent in crossing(hosts, here, buckets):
            assert sent <= 1.02 * 2 * (hosts - 1) / hosts * nbytes, (buckets[0], sent, nbytes)


# ---------------------------------------------------------------------- recipes


@on_ranks(4)
@pytest.mark.parametrize("through", ["groups", "memory"])
def test_recipes_train_with_the_same_bits_through_groups_and_memory(through: str) -> None:
    """Those of sums inside hosts, then across; `test_several_hosts` compares them through memory."""
    with (in_memory.on_hosts if through == "memory" else on_hosts)("2 x 2") as group:
        run = Run.of(Row("lazy", "tower", "ordinary", "hosts"), Stage(DistributedDataParallel))
        text = str(run.optimizer.explain())
        assert "2 hosts of 2 ranks: sums go inside a host, then across" in text, text
        if through == "memory":
            return
        for stage in RECIPES[2:]:  # whose sums go to owners
            assert_row(Row(stage, "tower", "ordinary", "hosts"))
        run.loss(0).backward()
        if group.rank == 1:
            run.optimizer.optim.step = mock.Mock(side_effect=ArithmeticError("on purpose"))
        with pytest.raises(ArithmeticError if group.rank == 1 else RemoteRankError, match="on purpose"):
            run.optimizer.step()


@on_ranks(4)
def test_where_hosts_cannot_send_in_two_levels_explain_says_why() -> None:
    param = nn.Parameter(torch.ones(8))
    for kind, why in ("turns", "the ranks of a host do not adjoin"), ("4 x 1", "one on each"):
        with on_hosts(kind):
            optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1)
            assert "go between all ranks at once: " in optimizer.explain().hosts
            assert why in optimizer.explain().hosts
    found_again()
    assert not ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1).explain().hosts


# ---------------------------------------------------------------------- streams and communicators


RUNS: dict[str, dict[str, Any]] = {
    stage: STAGES[stage] for stage in ("sharded gradients", "sharded parameters")
}
RUNS["sharded gradients, no_sync"] = STAGES["sharded gradients"] | LOOPS["no_sync"]
RUNS["sharded parameters, checkpointing"] = STAGES["sharded parameters"] | LOOPS["checkpointing"]


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_hosts_is_ordered(name: str) -> None:
    def make() -> RunOnStreams:
        found_again()  # the groups' stream is one of the model, or none
        return RunOnStreams(**RUNS[name])

    with on_hosts("2 x 2"):
        assert_ordered(make=make)
