"""``metrics()``: what was sent, in how many collectives, and how long callers waited, by phase."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pool import on_ranks
from training import set_grads
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import _OPEN, Phase, Traffic, broadcast_nbytes
from zero_optim.comm.works import Work
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

SHAPES = ((16, 8), (8,), (24, 4), (3,), (16, 16), (5, 5))
PHASES = {"gather", "reduce", "clip", "agree", "state", "total"}
# By number of ranks: how often a rank sends a row that gloo broadcasts, by its place behind the source.
TREES = {1: (0,), 2: (1, 0), 3: (2, 0, 0), 4: (2, 1, 0, 0), 5: (3, 1, 0, 0, 0), 8: (3, 2, 1, 1, 0, 0, 0, 0)}


class Ticks:
    """A clock that goes on by a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def make(**options: object) -> ZeroRedundancyOptimizer:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001, **options)


def net() -> nn.Module:
    """A model whose parameters need no padding: each fills whole units of 64 bytes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def gathered(optimizer: ZeroRedundancyOptimizer) -> tuple[int, int]:
    """Bytes that this rank sends in a gather of everything, and broadcasts, by the plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    in_memory = optimizer.ranks.shared_memory(torch.device("cpu")) is not None
    times = (size - 1, *[0] * (size - 1)) if in_memory else TREES[size]
    nbytes, rows = 0, 0
    for bucket in optimizer.core.engine.buckets:
        layout = bucket.layout
        for row in layout.rows:
            nbytes += times[(rank - row.owner) % size] * (row.stop - row.start) * 4
            rows += 1
    return nbytes, rows


def counted(optimizer: ZeroRedundancyOptimizer | DistributedDataParallel, phase: str) -> tuple[float, float]:
    figures = optimizer.metrics(reset=False)
    return figures[f"sent_bytes/{phase}"], figures[f"collectives/{phase}"]


def test_gloo_sends_a_broadcast_along_a_tree() -> None:
    for size, times in TREES.items():
        assert tuple(broadcast_nbytes(1, behind, size, is_tree=True) for behind in range(size)) == times
        assert sum(times) == size - 1, "each rank but the source receives it once"
    assert [broadcast_nbytes(7, behind, 4, is_tree=False) for behind in range(4)] == [7, 7, 7, 0], "a chain"
    assert broadcast_nbytes(7, 0, 1, is_tree=False) == 0


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
    assert counted(optimizer, "clip") == counted(optimizer, "total") == ((size - 1) * (16 + 9 * slots), 1)


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


@on_ranks(2)
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, TorchDistributedDataParallel])
def test_gradients_sent_to_owners_are_counted(wrapper: type[nn.Module]) -> None:
    model = wrapper(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    model.register_comm_hook(None, zero_step(optimizer, gradients="owners", ddp=model))
    rank, ours = dist.get_rank(), wrapper is DistributedDataParallel
    for _ in range(2):
        optimizer.metrics()
        if ours:
            model.metrics()
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        others = [param for param, owner in optimizer.owners().items() if owner != rank]
        assert counted(optimizer, "reduce")[0] == sum(param.numel() * 4 for param in others)
        assert counted(optimizer, "gather")[0] == gathered(optimizer)[0]
        figures = optimizer.metrics()
        assert figures["steps"] == 1
        if ours:
            assert counted(model, "reduce") == (0, 0), "what a hook sends is the hook's"
            assert model.metrics()["exposed_seconds/reduce"] > 0


@on_ranks(2)
def test_the_average_that_zero_step_makes_is_counted() -> None:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.register_comm_hook(None, zero_step(optimizer))
    optimizer.metrics()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    size = dist.get_world_size()
    whole = sum(param.numel() for param in model.parameters()) * 4
    nbytes, _ = counted(optimizer, "reduce")
    assert abs(nbytes - 2 * (size - 1) / size * whole) <= 1, "but for rounding"


@on_ranks(2, 4)
@pytest.mark.parametrize("find_unused", [False, True])
def test_our_ddp_counts_its_own_reductions(find_unused: bool) -> None:
    model = DistributedDataParallel(net(), find_unused_parameters=find_unused, bucket_cap_mb=0.001)
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
def test_seconds_grow_while_a_step_gathers() -> None:
    optimizer = make()
    optimizer.ranks.phase.traffic.clock = Ticks()
    for number in range(3):
        optimizer.metrics()
        set_grads(list(optimizer.owners()), number)
        optimizer.step()
        figures = optimizer.metrics()
        # To start them and to wait take a tick each, and each gather two, as the clock is looked at twice.
        assert figures["exposed_seconds/total"] == 2 * figures["collectives/gather"] + 2 > 2
    # Outside of that the clock is not looked at. To clip is counted where it waits alone.
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.metrics()["exposed_seconds/total"] == 1


@on_ranks(2)
def test_a_lazy_gather_is_waited_for_in_the_forward_pass() -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    optimizer.ranks.phase.traffic.clock = Ticks()
    optimizer.gather_lazily(model)
    optimizer.metrics()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    stepped = optimizer.metrics()
    # To start them takes one tick.
    assert (stepped["exposed_seconds/total"], stepped["collectives/gather"]) == (1, gathered(optimizer)[1])
    model(torch.ones(4, 8))
    waited = optimizer.metrics()
    # The rows of a bucket are waited for together.
    num_buckets = len(optimizer.core.engine.buckets)
    assert (waited["exposed_seconds/gather"], waited["collectives/gather"]) == (num_buckets, 0)


def test_a_span_that_a_signal_handler_opens_in_another_is_counted() -> None:
    handlers = [lambda: Phase(traffic, "clip"), lambda: Phase(traffic, "clip")]

    def clock() -> float:
        if handlers:
            with handlers.pop()().held_up():
                pass
        return 1.0

    traffic = Traffic(clock)
    with Phase(traffic, "gather").held_up():
        pass
    assert not handlers
    assert _OPEN.seconds == []


def test_each_second_counts_once_in_the_innermost_span() -> None:
    clock = Ticks()
    reducer, optimizer = Traffic(clock), Traffic(clock)
    with Phase(reducer, "reduce").held_up():  # ticks 1 and 8
        with Phase(optimizer, "reduce").held_up(), Phase(optimizer, "agree").held_up():  # 2, 5 and 3, 4
            pass
        with Phase(reducer, "reduce", is_exposed=False).held_up():
            pass
        with Phase(reducer, "reduce").held_up():  # 6 and 7
            pass
    ours, theirs = (each.figures(("reduce", "agree"), "", reset=False) for each in (reducer, optimizer))
    assert ours["exposed_seconds/reduce"] == 7 - 3
    assert (theirs["exposed_seconds/reduce"], theirs["exposed_seconds/agree"]) == (3 - 1, 1)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_what_a_backward_pass_does_for_communication_is_exposed(kind: str) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    wrapped = {"sharded": ShardedDataParallel, "plain": DistributedDataParallel}[kind]
    ddp = wrapped(model, optimizer) if kind == "sharded" else wrapped(model)
    loss = ddp(torch.ones(4, 8)).sum()
    ddp.metrics()
    uncounted = lambda work: [handle.wait() for handle in work.handles]  # noqa: E731
    with mock.patch.object(Work, "wait", uncounted):
        loss.backward()
    # To copy gradients, to start, to add and to hand out is counted all the same.
    assert ddp.metrics()["exposed_seconds/reduce"] > 0, kind


@on_ranks(2)
def test_sharded_gradients_are_counted_where_they_are_reduced() -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    ddp = ShardedDataParallel(model, optimizer)
    optimizer.metrics()
    ddp.metrics()
    for _ in range(2):
        ddp(torch.ones(4, 8)).sum().backward()
    figures = ddp.metrics()
    others = [param for param, owner in optimizer.owners().items() if owner != dist.get_rank()]
    assert figures["sent_bytes/reduce"] >= 2 * sum(param.numel() * 4 for param in others)
    assert figures["exposed_seconds/reduce"] == figures["exposed_seconds/total"] > 0
    assert not any(optimizer.metrics().values()), "its lanes are used, but it has reduced nothing itself"


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
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        before = optimizer.metrics(reset=False)
        assert not any(other.metrics().values()), "a copy has sent nothing"
        set_grads(list(other.owners()), 1)
        other.step()
        assert counted(other, "gather") == gathered(other)
        assert other.metrics()["steps"] == 1
        assert optimizer.metrics(reset=False) == before
    assert counted(optimizer, "gather") == gathered(optimizer)


@on_ranks(1)
def test_one_rank_sends_nothing() -> None:
    optimizer = make()
    set_grads(list(optimizer.owners()), 0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    figures = optimizer.metrics()
    assert figures["steps"] == 1
    assert not any(value for key, value in figures.items() if key.startswith(("sent", "collectives"))), (
        figures
    )
