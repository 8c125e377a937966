"""Our DDP has its buckets in the rows of the optimizer, where a hook reduces them to owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from parity_models import Tower
from parity_runs import OPTIONS, STAGES, Row, Run, Stage
from pool import on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import row_sum
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import reduce_to_owners
from zero_optim.step.partial import PartialGradient

pytestmark = pytest.mark.on_sockets("it looks at what goes through the backend")


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


HOOKS = {"reduce_to_owners": STAGES["to owners"], "zero_step": STAGES["overlap, owners"]}
NO_HOOK = Stage(DistributedDataParallel)
both_hooks = pytest.mark.parametrize("hook", HOOKS)
VIEWS, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}


def built(stage: Stage, model: str = "tower", option: str = "plain", **of_wrapper: Any) -> Run:
    with mock.patch.dict(OPTIONS, {option: replace(OPTIONS[option], of_wrapper=of_wrapper)}):
        run = Run.of(Row(stage="", model=model, loop="ordinary", option=option), stage)
    if stage.hook is not None:
        assert len(buckets_of(run)) == len(run.optimizer.core.bucket_members()) > 1
    return run


def buckets_of(run: Run) -> list[Any]:
    return list(run.model.reducer.own.assignment.buckets)


def memories(run: Run) -> set[int]:
    """Where the buckets lie."""
    return {bucket.flat.untyped_storage().data_ptr() for bucket in buckets_of(run)}


def backward(run: Run, number: int) -> None:
    """Run a backward pass, in which rows are sent from the memory of their buckets."""
    loss = run.loss(number)
    before = memories(run)
    with rows_sent() as sent:
        loss.backward()
    known = before | memories(run)  # the pass may make the buckets anew when it begins
    assert sent
    for row in sent:
        assert row.untyped_storage().data_ptr() in known, "a row was copied"


def assert_alike(run: Run, whole: Run, where: object = "") -> None:
    assert_same_bits(list(run.net.parameters()), list(whole.net.parameters()), where)


def assert_views(run: Run) -> None:
    """What this rank owns of the gradients lies in the buckets."""
    known = memories(run)
    for param in run.optimizer.owned_parameters():
        rows = param.grad.piece if isinstance(param.grad, PartialGradient) else param.grad
        assert rows is None or rows.untyped_storage().data_ptr() in known


@on_ranks(2)
@both_hooks
@pytest.mark.parametrize(
    ("model", "option", "of_wrapper"),
    [
        *product(["tower"], ["plain", "cuts"], [{}, VIEWS, STATIC]),
        ("unused", "plain", {"find_unused_parameters": True}),
    ],
)
def test_rows_are_sent_from_their_bucket(
    hook: str, model: str, option: str, of_wrapper: dict[str, bool]
) -> None:
    run = built(HOOKS[hook], model, option, **of_wrapper)
    for number in range(4):
        run.optimizer.zero_grad()
        backward(run, number)
        if of_wrapper == VIEWS and hook == "reduce_to_owners":
            assert_views(run)
        run.optimizer.step()


@on_ranks(2, 4)
@pytest.mark.parametrize("option", ["plain", "cuts"])
def test_what_a_rank_owns_of_a_bucket_lies_side_by_side(option: str) -> None:
    run = built(HOOKS["reduce_to_owners"], option=option)
    for number in range(3):  # made anew in between
        run.optimizer.zero_grad()
        backward(run, number)
        pieces = run.optimizer.pieces()
        for bucket in buckets_of(run):
            owners = [piece.owner for param in bucket.params for piece in pieces[param]]
            assert owners == sorted(owners)
    assert sum(len(bucket.params) for bucket in buckets_of(run)) == len(list(run.net.parameters()))
    assert run.model.reducer.own.history.has_rebuilt


@on_ranks(2)
@both_hooks
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_hook_that_comes_late_has_its_rows_too(hook: str, as_view: bool) -> None:
    """The hook comes when gradients of plain passes, reduced or not, are there."""
    whole, run = runs = [built(NO_HOOK, gradient_as_bucket_view=as_view) for _ in range(2)]
    for number in range(3):
        for each in runs:
            each.optimizer.zero_grad()
            each.loss(number).backward()
            each.optimizer.step()
    for each in runs:
        each.model.zero_grad()
        with each.model.no_sync():
            each.loss(3).backward()
    make = HOOKS[hook].hook
    assert make is not None
    run.model.register_comm_hook(None, make(run.optimizer))
    for number in range(4, 7):
        whole.loss(number).backward()
        backward(run, number)
        for each in runs:
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert_alike(run, whole, number)
    assert len(buckets_of(run)) == len(run.optimizer.core.bucket_members())


@on_ranks(2)
def test_added_parameters_have_their_place_in_rows() -> None:
    net = Tower()
    params = list(net.parameters())
    optimizer = ZeroRedundancyOptimizer(params[:4], torch.optim.SGD, lr=0.1, bucket_cap_mb=0.001)
    run = Run(DistributedDataParallel(net), net, optimizer, torch.float32)
    run.model.register_comm_hook(None, reduce_to_owners(optimizer))
    optimizer.add_param_group({"params": params[4:]})
    backward(run, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(run, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for number in range(2):
        optimizer.zero_grad()
        backward(run, number)
        optimizer.step()


@on_ranks(2)
def test_a_model_that_is_bound_again_has_rows_again() -> None:
    runs = [built(NO_HOOK), built(HOOKS["reduce_to_owners"])]
    for run in runs:
        run.loss(0).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.model.detach()
        run.optimizer.detach()
        run.optimizer.rebind()
        run.model.rebind()
        if run is runs[1]:
            run.model.register_comm_hook(None, reduce_to_owners(run.optimizer))
            backward(run, 1)
        else:
            run.loss(1).backward()
        run.optimizer.step()
    assert_alike(*runs)


@on_ranks(2)
def test_a_model_that_the_optimizer_lacks_parts_of_keeps_its_buckets() -> None:
    plain, net = DistributedDataParallel(Tower()), Tower()
    few = ZeroRedundancyOptimizer(net.last.parameters(), torch.optim.SGD, lr=0.1)
    run = Run(DistributedDataParallel(net), net, few, torch.float32)
    run.model.register_comm_hook(None, reduce_to_owners(few))
    whole = [bucket.indices for bucket in plain.reducer.own.assignment.buckets]
    assert whole == [bucket.indices for bucket in buckets_of(run)], "the hook itself says what is wrong"
    with pytest.raises(ValueError, match="not in the optimizer, so it has no owner"):
        run.loss(0).backward()
