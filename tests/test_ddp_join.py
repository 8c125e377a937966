"""Uneven inputs: what ours does inside ``Join`` is what PyTorch's wrapper does."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, Pair, WithBuffers, WithSpare, assert_same, mlp, mlp_loss
from pool import on_ranks
from training import assert_equal_on_all_ranks, assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel


def train(model: nn.Module, count: int, first: int = 0) -> list[list[Tensor]]:
    """Run plain SGD over some batches; gives the gradients of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    for number in range(first, first + count):
        optimizer.zero_grad()
        mlp_loss(model, number).backward()
        trace.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        optimizer.step()
    return trace


def compare(pair: Pair, traces: list[list[list[Tensor]]], where: object) -> None:
    for ours, theirs in zip(*traces, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, where)
    for a, b in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
        assert_same(a.detach(), b.detach(), where)
    assert_equal_on_all_ranks(pair.ours.parameters(), where)


@on_ranks(2)
@pytest.mark.parametrize("by_initial_size", [True, False])
def test_uneven_inputs_give_what_pytorchs_wrapper_gives(by_initial_size: bool) -> None:
    """Rank 0 has no batch, and rank 1 has one."""
    for options in ({"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        pair = Pair.of(mlp(), bucket_cap_mb=SMALL_MB, **options)
        traces = []
        for model in pair:
            with Join([model], divide_by_initial_world_size=by_initial_size):
                traces.append(train(model, dist.get_rank()))
        compare(pair, traces, options)
        traces = [train(model, 2, first=50) for model in pair]  # and the loop after it goes on as ever
        compare(pair, traces, (options, "after"))


@on_ranks(2)
def test_a_rank_without_a_batch_in_a_static_graph() -> None:
    rank = dist.get_rank()
    model, alone = DistributedDataParallel(mlp(), static_graph=True), mlp()
    with model.join(divide_by_initial_world_size=False):
        train(model, 3 * rank)
    if rank:
        train(alone, 3)
        assert_same_bits(list(model.parameters()), list(alone.parameters()))
    assert model.reducer.own.history.learnt is not None
    train(model, 2, first=20)


@on_ranks(2)
def test_a_rank_without_a_batch_learns_which_buckets_are_left_out() -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}
    skip = {"skip_all_reduce_unused_params": True}
    models = [DistributedDataParallel(WithSpare(), **options, **more) for more in ({}, skip)]
    reduced = []
    for model in models:
        with model.join():
            train(model, 3 * dist.get_rank())
        reduced.append(model.reducer.own.history.num_buckets_reduced)
        train(model, 2)
    assert reduced == [6, 4]
    assert_same_bits(*(list(model.parameters()) for model in models))


@on_ranks(2)
def test_buffers_come_from_a_rank_that_has_not_joined() -> None:
    pair = Pair.of(WithBuffers())
    traces = []
    for model in pair:
        with Join([model]):
            traces.append(train(model, 2 + dist.get_rank()))
    compare(pair, traces, "buffers")
    for ours, theirs in zip(pair.ours.buffers(), pair.theirs.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2)
def test_accumulation_inside_join_with_a_sharded_optimizer_is_refused_in_the_first_pass() -> None:
    model, other = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def run() -> None:
        with Join([model, sharded, other]):
            with other.no_sync():
                mlp_loss(other, 0).backward()
            for number in range(2 * (1 + dist.get_rank())):
                with model.no_sync():
                    mlp_loss(model, number).backward()

    with pytest.raises(RuntimeError, match=r"inside Join with a sharded optimizer.*Leave no_sync\(\) out"):
        run()


@on_ranks(2)
def test_no_sync_around_backward_alone_is_refused_inside_join() -> None:
    model = DistributedDataParallel(mlp())

    def run() -> None:
        with model.join():
            for number in range(2):
                loss = mlp_loss(model, number)
                with model.no_sync():
                    loss.backward()

    with pytest.raises(RuntimeError, match=r"cannot be used inside Join.*Put forward.. under no_sync.. too"):
        run()
