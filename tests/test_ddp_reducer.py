"""`Reducer` without any wrapper."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from ddp_pairs import assert_averaged, assert_same, batch, check_average, mlp, mlp_loss, settled
from fake_streams import fake_streams
from pool import on_ranks
from zero_optim.ddp import GradBucket, Reducer, ReducerOptions
from zero_optim.ddp.reducer.assignment import BucketAssignment, ReducedParams, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass, Reductions
from zero_optim.ddp.reducer.gradient_bucket import (
    BATCH_NBYTES,
    LARGE_NBYTES,
    ReducerBucket,
)
from zero_optim.ddp.reducer.graph import tensors_in
from zero_optim.ddp.reducer.history import History
from zero_optim.errors import RankMismatchError, ReductionError
from zero_optim.plan.groups import names_text
from zero_optim.shard.engine import Engine

SMALL = (500,)


@on_ranks(2, slow=4)
def test_every_backward_pass_leaves_averages_until_the_reducer_is_closed() -> None:
    for view in (False, True):
        net, clean = mlp(), mlp()
        options = ReducerOptions(bucket_caps_nbytes=SMALL, gradient_as_bucket_view=view)
        reducer = Reducer(net.named_parameters(), options=options)
        for number in range(4):
            check_average(net, clean, number, view)
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
def test_gradients_are_rounded_then_averaged_in_another_dtype() -> None:
    net, clean = mlp(), mlp()
    options = ReducerOptions(
        bucket_caps_nbytes=SMALL, reduce_dtype=torch.bfloat16, gradient_as_bucket_view=True
    )
    reducer = Reducer(net.named_parameters(), options=options)
    for number in range(3):
        net.zero_grad()
        mlp_loss(net, number).backward()
        sums = [torch.zeros_like(param, dtype=torch.bfloat16) for param in clean.parameters()]
        for rank in range(dist.get_world_size()):
            clean.zero_grad()
            mlp_loss(clean, number, rank).backward()
            for total, param in zip(sums, clean.parameters(), strict=True):
                assert param.grad is not None
                total.add_(param.grad.bfloat16() / dist.get_world_size())
        for param, total in zip(net.parameters(), sums, strict=True):
            assert_same(param.grad, total.float(), number)
    reducer.close()


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


@on_ranks(1)
def test_unused_parameters_hold_up_nothing_once_outputs_were_seen() -> None:
    """Which bucket was launched when how many gradients had come."""
    for prepared in (True, False):
        net, came, launched = Parts(), [0], []
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(lambda _, came=came: came.__setitem__(0, came[0] + 1))
        options = ReducerOptions(bucket_caps_nbytes=(1,), find_unused_parameters=True)  # a tensor a bucket
        reducer = Reducer(net.named_parameters(), options=options)

        def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
            launched.append((bucket.index(), came[0]))  # noqa: B023 - called in this round
            return settled(bucket.buffer())

        reducer.register_comm_hook(None, hook)
        out = net.second(net.first(batch(0, 5, 8)))
        if prepared:
            reducer.prepare(out)
        out.sum().backward()
        reducer.close()
        seen = [0, 0, 1, 2, 3, 4] if prepared else [4] * 6
        assert launched == list(enumerate(seen))


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
    reducer.futures.append(done)
    reducer.divisor = lambda: 1.0
    done.set_result(None)
    mlp_loss(net, 1).backward()
    assert_averaged(net, clean, lambda net, rank: 2 * mlp_loss(net, 1, rank), tolerance=1e-6)
    assert asked.count(True) == 1
    assert asked.count(False) == len(list(net.parameters())) + 1
    reducer.set_static_graph()
    reducer.reset()
    check_average(net, clean, 2 + 0 * rank)
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


# ---------------------------------------------------------------------- parts that need no ranks


@dataclass
class Output:
    main: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def test_a_container_that_holds_itself_is_looked_into_once() -> None:
    value: list[Any] = [torch.zeros(1)]
    value.append({"again": value, "more": [value, value]})
    output = Output(torch.zeros(2))
    output.rest["output"] = output
    assert [tensor.numel() for tensor in tensors_in(value)] == [1]
    assert [tensor.numel() for tensor in tensors_in(output)] == [2]


# ---------------------------------------------------------------------- buckets


def bucket_of(*shapes: tuple[int, ...], view: bool = False, batched: bool = False) -> ReducerBucket:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return ReducerBucket(range(len(shapes)), params, is_sparse=False, as_views=view, batched=batched)


def test_small_gradients_are_copied_in_batches_and_batched_ones_all_at_once() -> None:
    numel = LARGE_NBYTES // 4 - 1  # elements of the largest that are small
    length = BATCH_NBYTES // (4 * numel)  # of a batch
    shapes = [(numel + 1,), *[(numel,)] * 2 * length]
    plain, batched = (bucket_of(*shapes, batched=flag) for flag in (False, True))
    assert (plain.batch_length, plain.large_slots) == (length, {0})
    assert (batched.batch_length, batched.large_slots) == (len(shapes), frozenset())
    assert arrivals(shapes, batched=False) == [1] * length + [1 + length] * length + [1 + 2 * length]
    assert arrivals(shapes, batched=True) == [0] * 2 * length + [1 + 2 * length]
    sparse = ReducerBucket(
        [0], [nn.Parameter(torch.zeros(numel + 1))], is_sparse=True, as_views=False, batched=False
    )
    assert sparse.large_slots == frozenset()


def arrivals(shapes: list[tuple[int, ...]], *, batched: bool) -> list[int]:
    """How many gradients lie in the bucket each time that one more has come."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    count = len(params)
    options = ReducerOptions(bucket_caps_nbytes=(2**30,), batched_grad_copy=batched)
    assignment = assign(ReducedParams.of(params), options, range(count))
    (bucket,) = assignment.buckets
    current = BackwardPass(
        assignment, History(count), options, Reductions(Engine(), landed), divisor=2.0, can_carry_word=True
    )
    filled = []
    for index, param in enumerate(params):
        param.grad = torch.ones_like(param)
        current.arrived(index)
        filled.append(sum(bool((view == 0.5).all()) for view in bucket.views))
    return filled


def sparse_bucket() -> ReducerBucket:
    return ReducerBucket(
        [0], [nn.Parameter(torch.zeros(5, 2))], is_sparse=True, as_views=False, batched=False
    )


def sparse_grad(*rows: int) -> Tensor:
    return torch.sparse_coo_tensor([list(rows)], torch.ones(len(rows), 2), (5, 2), check_invariants=True)


# ---------------------------------------------------------------------- one pass


def landed(bucket: ReducerBucket) -> Callable[[], Tensor]:
    """Launch a reduction that leaves a bucket as it is."""
    return lambda: bucket.flat


def assigned(
    params: list[nn.Parameter], options: ReducerOptions, order: list[int] | None = None
) -> BucketAssignment:
    return assign(ReducedParams.of(zip("abc", params, strict=True)), options, order)


def test_a_gradient_that_comes_though_it_was_taken_for_unused() -> None:
    """In time it is reduced; too late it is reported."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    options = ReducerOptions(bucket_caps_nbytes=(16,), find_unused_parameters=True)
    assignment = assigned(params, options, [2, 1, 0])  # c and b, then a
    for presumed, is_late in (([1], False), ([1, 2], True)):
        current = BackwardPass(assignment, History(3), options, Reductions(Engine(), landed))
        current.presume_unused(presumed)
        params[1].grad = torch.ones(2)
        current.arrived(1)
        message = current.failure() or ""
        assert message.startswith("a gradient came for b after") == is_late
        assert current.num_launched == int(is_late)
        current.arrived(1)
        assert "only once. A second gradient came in one backward pass" in str(current.failure())


# ---------------------------------------------------------------------- texts


def test_messages_name_some_parameters_and_count_the_rest() -> None:
    names = [f"layer.{number}" for number in range(13)]
    assert names_text(names[:2]) == "layer.0, layer.1"
    assert names_text(names).endswith("layer.9 and 3 more")


def test_the_memory_of_a_sparse_gradient_is_kept_for_the_stream_that_reads_it() -> None:
    bucket, grad = sparse_bucket(), sparse_grad(1, 3)
    bucket.params[0].grad = grad
    with fake_streams() as accelerator:
        bucket.record_use([0])
        assert accelerator.were_used_on("main", grad._indices(), grad._values())
