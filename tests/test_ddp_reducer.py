"""`Reducer` without any wrapper."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from ddp_pairs import assert_averaged, assert_same, batch, mlp, mlp_loss, of_batch
from pool import Ranks, on_ranks
from zero_optim.ddp import GradBucket, Reducer, ReducerOptions
from zero_optim.errors import RankMismatchError, ReductionError

SMALL = (500,)


def check_against(net: nn.Module, clean: nn.Module, number: int, where: object = "") -> None:
    """Run one pass, and compare with the average over all ranks."""
    net.zero_grad()
    mlp_loss(net, number).backward()
    size = dist.get_world_size()
    assert_averaged(net, clean, of_batch(number), (where, number), size=size, tolerance=1e-6)


@on_ranks(2, slow=4)
def test_every_backward_pass_leaves_averages() -> None:
    for view in (False, True):
        net, clean = mlp(), mlp()
        options = ReducerOptions(bucket_caps_nbytes=SMALL, gradient_as_bucket_view=view)
        reducer = Reducer(net.named_parameters(), options=options)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, clean)]
        for number in range(4):
            check_against(net, clean, number, view)
            for param, other in zip(net.parameters(), clean.parameters(), strict=True):
                assert param.grad is not None
                other.grad = param.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            clean.zero_grad()
        assert reducer.names == [name for name, _ in clean.named_parameters()]
        assert (reducer.history.num_passes, reducer.history.has_rebuilt) == (4, True)
        reducer.close()
        reducer.close()
        net.zero_grad()
        mlp_loss(net, 9).backward()
        mlp_loss(clean, 9).backward()
        for param, other in zip(net.parameters(), clean.parameters(), strict=True):
            assert_same(param.grad, other.grad, "this rank's own after close()")


@on_ranks(2)
def test_names_are_numbers_where_none_are_given() -> None:
    rank, net = dist.get_rank(), mlp()
    reducer = Reducer(net.parameters())
    assert reducer.names[:2] == ["parameter 0", "parameter 1"]
    with pytest.raises(ReductionError, match=r"no gradient for parameter 0, parameter 1\."):
        net[2:](batch(0, 5, 8)).sum().backward()
    assert reducer.process_group is dist.group.WORLD
    del reducer
    group = dist.new_group([rank], use_local_synchronization=True)
    alone, clean = mlp(), mlp()
    kept = Reducer(alone.parameters(), group)
    mlp_loss(alone, 0).backward()
    mlp_loss(clean, 0).backward()
    for param, other in zip(alone.parameters(), clean.parameters(), strict=True):
        assert_same(param.grad, other.grad, "a group of one")
    kept.close()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


@on_ranks(2)
def test_prepare_looks_at_outputs() -> None:
    """With `prepare` a bucket of unused parameters is launched first, and reentrant checkpointing works."""
    net, clean = Parts(), Parts()
    options = ReducerOptions(bucket_caps_nbytes=SMALL, find_unused_parameters=True)
    reducer = Reducer(net.named_parameters(), options=options)
    for number in range(3):
        net.zero_grad()
        out = net(batch(number, 5, 8).requires_grad_())
        reducer.prepare({"out": [out]})
        out.square().mean().backward()
        loss = lambda net, rank, n=number: net(batch(n, 5, 8, rank=rank).requires_grad_()).square().mean()  # noqa: E731
        assert_averaged(net, clean, loss, number, tolerance=1e-6)
    reducer.close()


def check_launches(prepared: bool) -> list[tuple[int, int]]:
    """Which bucket was launched when how many gradients had come."""
    net, came, launched = Parts(), [0], []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda _: came.__setitem__(0, came[0] + 1))
    options = ReducerOptions(bucket_caps_nbytes=(1,), find_unused_parameters=True)  # a tensor a bucket
    reducer = Reducer(net.named_parameters(), options=options)

    def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
        launched.append((bucket.index(), came[0]))
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    reducer.register_comm_hook(None, hook)
    out = net.second(net.first(batch(0, 5, 8)))
    if prepared:
        reducer.prepare(out)
    out.sum().backward()
    reducer.close()
    return launched


def test_unused_parameters_hold_up_nothing_once_outputs_were_seen(ranks1: Ranks) -> None:
    (with_outputs,) = ranks1.run(check_launches, True)
    (without,) = ranks1.run(check_launches, False)
    assert with_outputs == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert without == [(number, 4) for number in range(6)]


@on_ranks(2)
def test_what_users_set_has_effect() -> None:
    rank, net, clean = dist.get_rank(), mlp(), mlp()
    asked: list[bool] = []

    def wanted(was_prepared: bool) -> bool:
        asked.append(was_prepared)
        return len(asked) > len(list(net.parameters()))

    reducer = Reducer(net.named_parameters(), wanted=wanted)
    mlp_loss(net, 0).backward()  # asked at each gradient, and not wanted
    mlp_loss(clean, 0).backward()
    for param, other in zip(net.parameters(), clean.parameters(), strict=True):
        assert_same(param.grad, other.grad, "not reduced")
    assert reducer.history.num_passes == 0
    clean.zero_grad()
    net.zero_grad()
    done: Future[object] = Future()
    done.then(lambda _: asked.append(True))
    reducer.wait_also(done)
    reducer.divide_by(lambda: 1.0)
    done.set_result(None)
    mlp_loss(net, 1).backward()
    assert_averaged(net, clean, lambda net, rank: 2 * mlp_loss(net, 1, rank), tolerance=1e-6)
    assert asked.count(True) == 1
    assert asked.count(False) == len(list(net.parameters())) + 1
    reducer.set_static_graph()
    reducer.reset()
    check_against(net, clean, 2 + 0 * rank)
    assert reducer.history.learnt == [1] * len(reducer.params)
    reducer.close()


@on_ranks(2)
def test_arguments_are_checked_on_every_rank() -> None:
    rank, net = dist.get_rank(), mlp()
    with pytest.raises(ValueError, match="at least one parameter"):
        Reducer([])
    with pytest.raises(TypeError, match=r"expected parameters or \(name, parameter\) pairs, got str"):
        Reducer(["weight"] if rank else net.parameters())  # type: ignore[list-item, arg-type]
    with pytest.raises(ValueError, match=re.escape("0.weight gets no gradient")):
        Reducer([("0.weight", net[0].weight.detach())])
    with pytest.raises(ValueError, match="on one device, got cpu, meta"):
        Reducer([net[0].weight, torch.zeros(3, device="meta", requires_grad=True)])
    with pytest.raises(ValueError, match="capacity of at least 1 byte"):
        Reducer(net.parameters(), options=ReducerOptions(bucket_caps_nbytes=()))
    with pytest.raises(
        RankMismatchError,
        match=r"what the reducer was given: rank 0 has 8.bias .*rank 1 has nothing more",
    ):
        Reducer(list(net.named_parameters())[: 10 - rank])
    with pytest.raises(RankMismatchError, match="static_graph=True"):
        Reducer(net.parameters(), options=ReducerOptions(static_graph=rank == 1))
    other = copy.deepcopy(net)
    Reducer(other.parameters(), checks=False, options=ReducerOptions(static_graph=rank == 1))
