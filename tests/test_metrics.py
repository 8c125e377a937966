"""``metrics()``: what was sent, in how many collectives, and how long callers waited, by phase."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from training import set_grads
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp import DistributedDataParallel
from zero_optim.health.stamp import STAMP_NBYTES

SHAPES = ((16, 8), (8,), (24, 4), (3,), (16, 16), (5, 5))
PHASES = {"gather", "reduce", "clip", "agree", "state", "total"}
# By number of ranks: how often a rank sends a row that gloo broadcasts, by its place behind the source.
TREES = {2: (1, 0), 4: (2, 1, 0, 0)}


def make(**options: object) -> ZeroRedundancyOptimizer:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001, **options)


def gathered(optimizer: ZeroRedundancyOptimizer) -> tuple[int, int]:
    """Bytes that this rank sends in a gather of everything, and collectives, by the plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    in_memory = optimizer.ranks.shared_memory(torch.device("cpu")) is not None
    times = (size - 1, *[0] * (size - 1)) if in_memory else TREES[size]
    nbytes, rows = (size - 1) * STAMP_NBYTES, 1  # the header
    for bucket in optimizer.core.engine.buckets:
        layout = bucket.layout
        for row in layout.rows:
            nbytes += times[(rank - row.owner) % size] * (row.stop - row.start) * 4
            rows += 1
    return nbytes, rows


def counted(optimizer: ZeroRedundancyOptimizer | DistributedDataParallel, phase: str) -> tuple[float, float]:
    figures = optimizer.metrics(reset=False)
    return figures[f"sent_bytes/{phase}"], figures[f"collectives/{phase}"]


@on_ranks(2, 4)
def test_a_step_and_clipping_are_counted_as_the_plan_says() -> None:
    optimizer = make()
    optimizer.metrics()
    for number in range(2):
        set_grads(list(optimizer.owners()), number)
        optimizer.step()
    figures = optimizer.metrics()
    nbytes, rows = gathered(optimizer)
    assert figures["sent_bytes/gather"] == figures["sent_bytes/total"] == 2 * nbytes
    assert figures["collectives/gather"] == figures["collectives/total"] == 2 * rows
    assert figures["steps"] == 2
    assert figures["exposed_seconds/gather"] == figures["exposed_seconds/total"] > 0
    size, optimizer = dist.get_world_size(), make()
    set_grads(list(optimizer.owners()), 0)
    optimizer.metrics()
    optimizer.clip_grad_norm_(1.0)
    slots = max(list(optimizer.owners().values()).count(rank) for rank in range(size))
    width = slots + 1 - (16 + slots) // -8  # in doubles: norms and a filler, then a heading and a byte a slot
    assert counted(optimizer, "clip") == counted(optimizer, "total") == ((size - 1) * 8 * width, 1)


@on_ranks(2)
def test_a_call_tells_what_came_since_the_last_one() -> None:
    optimizer = make()
    first, second = optimizer.metrics(), optimizer.metrics()
    for figures in (first, second):
        names = {
            f"{kind}/{phase}" for phase in PHASES for kind in ("exposed_seconds", "sent_bytes", "collectives")
        }
        assert set(figures) == names | {"steps"}
        assert all(type(value) is float for value in figures.values()), figures
    assert first["collectives/agree"] > 0, "the ranks agreed on the plan"
    assert not any(second.values()), "nothing was done between the two calls"
    optimizer.metrics(reset=False)
    set_grads(list(optimizer.owners()), 0)
    optimizer.step()
    assert optimizer.metrics(reset=False) == optimizer.metrics() != optimizer.metrics()


@on_ranks(2, 4)
@pytest.mark.parametrize("find_unused", [False, True])
def test_our_ddp_counts_its_own_reductions(find_unused: bool) -> None:
    # Its parameters need no padding: each fills whole units of 64 bytes.
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    model = DistributedDataParallel(net, find_unused_parameters=find_unused, bucket_cap_mb=0.001)
    for number in range(3):
        model.metrics()
        model(torch.ones(4, 8)).sum().backward()
        size, params = dist.get_world_size(), list(model.parameters())
        whole = sum(param.numel() for param in params) * 4
        figures = model.metrics(reset=False)
        buckets = model.get_ddp_logging_data()["num_buckets_reduced"]
        of_all = sum(RankGroup.of(None).all_gather_json(figures["sent_bytes/reduce"]))  # chunks may differ
        assert abs(of_all - 2 * (size - 1) * whole) <= size * int(buckets)
        assert figures["collectives/reduce"] == buckets
        assert figures["passes"] == 1
        assert figures["exposed_seconds/reduce"] > 0
        report = 2 * (size - 1) * 4 * (1 + len(params)) // size if find_unused else 0
        rebuilt = number == 1 and not find_unused  # the ranks agree on the order of parameters, once
        assert figures["collectives/order"] == rebuilt
        assert counted(model, "agree")[0] == report
    assert model.metrics()["sent_bytes/total"] > 0
    assert not any(model.metrics().values())


@on_ranks(2)
def test_consolidation_is_counted_by_itself() -> None:
    optimizer = make(momentum=0.9)
    set_grads(list(optimizer.owners()), 0)
    optimizer.step()
    optimizer.metrics()
    optimizer.consolidate_state_dict(to=0)
    figures = optimizer.metrics()
    held = sum(param.numel() * 4 for param in optimizer.owned_parameters())
    sent = figures["sent_bytes/state"]
    assert sent > held if dist.get_rank() else sent < held, "rank 0 only agrees"
    assert figures["sent_bytes/gather"] == 0


@on_ranks(2)
def test_a_copy_counts_from_zero_for_itself() -> None:
    optimizer = make()
    set_grads(list(optimizer.owners()), 0)
    optimizer.step()
    other, before = copy.deepcopy(optimizer), optimizer.metrics(reset=False)
    assert not any(other.metrics().values()), "a copy has sent nothing"
    set_grads(list(other.owners()), 1)
    other.step()
    assert counted(other, "gather") == gathered(other)
    assert optimizer.metrics(reset=False) == before
