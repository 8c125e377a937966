"""Our DDP has its buckets in the rows of the optimizer, where a hook reduces them to owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlap
from overlap import Net, loss_of
from pool import on_ranks
from test_cut_runs import Wide
from test_hooks_to_owners import HOOKS, both_hooks
from test_sharded_training import Unused
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import row_sum
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import reduce_to_owners
from zero_optim.step.partial import PartialGradient


@contextmanager
def rows_sent() -> Iterator[list[Tensor]]:
    """Collect the rows that are sent in the body, of at least two elements."""
    sent: list[Tensor] = []
    exchange = row_sum.exchange

    def noted(group: Any, rows: Any, lanes: Any, about: str = "") -> Any:
        sent.extend(row for row in rows if row.is_floating_point() and row.numel() > 1)
        return exchange(group, rows, lanes, about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sum, "exchange", noted)
        yield sent


def memories(model: DistributedDataParallel) -> set[int]:
    """Where the buckets lie."""
    return {bucket.flat.untyped_storage().data_ptr() for bucket in model.reducer.own.assignment.buckets}


def backward(model: DistributedDataParallel, number: int) -> None:
    """Run a backward pass, in which rows are sent from the memory of their buckets."""
    loss = loss_of(model, number)
    before = memories(model)
    with rows_sent() as sent:
        loss.backward()
    known = before | memories(model)  # the pass may make the buckets anew when it begins
    assert sent
    for row in sent:
        assert row.untyped_storage().data_ptr() in known, "a row was copied"


def built(
    hook: str | None, model: Any = Net, cut: bool = False, **options: Any
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    make = None if hook is None else HOOKS[hook]
    wrapped, optimizer = overlap.built(DistributedDataParallel, make, model, cut, **options)
    if hook is not None:
        assert len(wrapped.reducer.own.assignment.buckets) == len(optimizer.core.bucket_members()) > 1
    return wrapped, optimizer


def assert_alike(model: nn.Module, whole: nn.Module, where: object = "") -> None:
    for (name, want), param in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param, want), (where, name)


def trains_alike(hook: str, **options: Any) -> None:
    (whole, one), (model, other) = built(None, **options), built(hook, **options)
    for number in range(4):
        one.zero_grad()
        other.zero_grad()
        loss_of(whole, number).backward()
        backward(model, number)
        if options.get("gradient_as_bucket_view") and hook == "reduce_to_owners":
            assert_views(model, other)
        one.step()
        other.step()
        assert_alike(model, whole, (options, number))


def assert_views(model: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer) -> None:
    """What this rank owns of the gradients lies in the buckets."""
    known = memories(model)
    for param in optimizer.owned_parameters():
        rows = param.grad.piece if isinstance(param.grad, PartialGradient) else param.grad
        assert rows is None or rows.untyped_storage().data_ptr() in known


@pytest.mark.on_sockets("it looks at what goes through the backend")
@on_ranks(2)
@both_hooks
def test_rows_are_sent_from_their_bucket_and_give_the_bits_of_ddp(hook: str) -> None:
    for cut in (False, True):
        model = Wide if cut else Net
        for as_view in (False, True):
            trains_alike(hook, model=model, cut=cut, gradient_as_bucket_view=as_view)
        trains_alike(hook, model=model, cut=cut, static_graph=True)
    trains_alike(hook, model=Unused, find_unused_parameters=True)


@pytest.mark.on_sockets("it looks at what goes through the backend")
@on_ranks(2, 4)
def test_what_a_rank_owns_of_a_bucket_lies_side_by_side() -> None:
    for cut in (False, True):
        model, optimizer = built("reduce_to_owners", Wide if cut else Net, cut=cut)
        for number in range(3):  # made anew in between
            optimizer.zero_grad()
            backward(model, number)
            pieces = optimizer.pieces()
            for bucket in model.reducer.own.assignment.buckets:
                params: Any = bucket.params
                owners = [piece.owner for param in params for piece in pieces[param]]
                assert owners == sorted(owners)
        order = [len(bucket.params) for bucket in model.reducer.own.assignment.buckets]
        assert sum(order) == len(list(model.parameters()))
        assert model.reducer.own.history.has_rebuilt


@pytest.mark.on_sockets("it looks at what goes through the backend")
@on_ranks(2)
@both_hooks
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_hook_that_comes_late_has_its_rows_too(hook: str, as_view: bool) -> None:
    """The hook comes when gradients of plain passes, reduced or not, are there."""
    (whole, one), (model, other) = (built(None, gradient_as_bucket_view=as_view) for _ in range(2))
    for number in range(3):
        for wrapped, optimizer in ((whole, one), (model, other)):
            optimizer.zero_grad()
            loss_of(wrapped, number).backward()
            optimizer.step()
    for wrapped in (whole, model):
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, 3).backward()
    model.register_comm_hook(None, HOOKS[hook](other))
    for number in range(4, 7):
        loss_of(whole, number).backward()
        backward(model, number)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, whole, number)
    assert len(model.reducer.own.assignment.buckets) == len(other.core.bucket_members())


@pytest.mark.on_sockets("it looks at what goes through the backend")
@on_ranks(2)
def test_added_parameters_have_their_place_in_rows() -> None:
    net = Net()
    params = list(net.parameters())
    optimizer = ZeroRedundancyOptimizer(params[:4], torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, reduce_to_owners(optimizer))
    optimizer.add_param_group({"params": params[4:]})
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for number in range(2):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


@pytest.mark.on_sockets("it looks at what goes through the backend")
@on_ranks(2)
def test_a_model_that_is_bound_again_has_rows_again() -> None:
    runs = [built(None), built("reduce_to_owners")]
    for hooked, (model, optimizer) in enumerate(runs):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.detach()
        optimizer.detach()
        optimizer.rebind()
        model.rebind()
        if hooked:
            model.register_comm_hook(None, reduce_to_owners(optimizer))
            backward(model, 1)
        else:
            loss_of(model, 1).backward()
        optimizer.step()
    assert_alike(runs[1][0], runs[0][0])


@on_ranks(2)
def test_a_model_that_the_optimizer_lacks_parts_of_keeps_its_buckets() -> None:
    net = Net()
    few = ZeroRedundancyOptimizer(net.head.parameters(), torch.optim.SGD, lr=0.1)
    plain, model = DistributedDataParallel(Net()), DistributedDataParallel(net)
    model.register_comm_hook(None, reduce_to_owners(few))
    whole, lacking = (
        [bucket.indices for bucket in wrapped.reducer.own.assignment.buckets] for wrapped in (plain, model)
    )
    assert whole == lacking, "the hook itself says what is wrong, in the backward pass"
    with pytest.raises(ValueError, match="not in the optimizer, so it has no owner"):
        loss_of(model, 0).backward()
