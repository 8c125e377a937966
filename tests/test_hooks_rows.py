"""Our DDP has its buckets in the rows of the optimizer, where a hook reduces them to owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from parity_runs import OPTIONS, STAGES, Row, Run, Stage
from pool import on_ranks
from training import assert_same_bits
from zero_optim.comm import row_sum
from zero_optim.ddp import DistributedDataParallel

pytestmark = pytest.mark.on_sockets("it looks at what goes through the backend")


@contextmanager
def rows_sent() -> Iterator[list[Tensor]]:
    """Collect the rows that are sent in the body."""
    sent: list[Tensor] = []
    exchange = row_sum.exchange

    def noted(lanes: Any, flat: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(flat)
        return exchange(lanes, flat, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sum, "exchange", noted)
        yield sent


HOOK = STAGES["overlap, owners"]
NO_HOOK = Stage(DistributedDataParallel)
VIEWS = {"gradient_as_bucket_view": True}


def built(stage: Stage, model: str = "tower", option: str = "plain", **of_wrapper: Any) -> Run:
    with mock.patch.dict(OPTIONS, {option: replace(OPTIONS[option], of_wrapper=of_wrapper)}):
        run = Run.of(Row(stage="", model=model, loop="ordinary", option=option), stage)
    if stage.hook is not None:
        assert len(buckets_of(run)) == len(run.optimizer.core.engine.buckets) > 1
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


@on_ranks(2)
@pytest.mark.parametrize(
    ("model", "option", "of_wrapper"),
    [
        ("tower", "cuts", VIEWS),
        ("tower", "plain", {"static_graph": True}),
        ("unused", "plain", {"find_unused_parameters": True}),
    ],
)
def test_rows_are_sent_from_their_bucket(model: str, option: str, of_wrapper: dict[str, bool]) -> None:
    run = built(HOOK, model, option, **of_wrapper)
    for number in range(4):
        run.optimizer.zero_grad()
        backward(run, number)
        run.optimizer.step()


@on_ranks(2)
def test_a_hook_that_comes_late_has_its_rows_too() -> None:
    """The hook comes when gradients of plain passes, reduced or not, are there."""
    whole, run = runs = [built(NO_HOOK, gradient_as_bucket_view=True) for _ in range(2)]
    for number in range(3):
        for each in runs:
            each.optimizer.zero_grad()
            each.loss(number).backward()
            each.optimizer.step()
    for each in runs:
        each.model.zero_grad()
        with each.model.no_sync():
            each.loss(3).backward()
    make = HOOK.hook
    assert make is not None
    run.model.register_comm_hook(None, make(run.optimizer))
    for number in range(4, 7):
        whole.loss(number).backward()
        backward(run, number)
        for each in runs:
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert_alike(run, whole, number)
    assert len(buckets_of(run)) == len(run.optimizer.core.engine.buckets)
