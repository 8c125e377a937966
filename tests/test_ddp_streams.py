"""Gradients that come on several streams: who reads one waits for the stream it was made on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from fake_streams import fake_streams
from modelled import modelled_streams
from pool import on_ranks
from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.comm.pending import Pending
from zero_optim.compat import streams
from zero_optim.ddp import DistributedDataParallel, Reducer
from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass, Reductions
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.history import History
from zero_optim.ddp.reducer.stream_order import StreamOrder
from zero_optim.shard.engine import Engine

SMALL = 10


class Begun:
    """A backward pass whose gradients come as they are told to, and the buckets that it launches."""

    def __init__(self, num_params: int, *caps: int) -> None:
        self.params = [torch.zeros(SMALL, requires_grad=True) for _ in range(num_params)]
        self.launched: list[int] = []
        options = ReducerOptions(bucket_caps_nbytes=caps or (2**30,), limits_first_buckets=True)
        assignment = assign(ReducedParams.of(self.params), options)
        self.current = BackwardPass(
            assignment, History(num_params), options, Reductions(Engine(), self.launch), divisor=2.0
        )

    def launch(self, bucket: ReducerBucket) -> Pending[torch.Tensor]:
        self.launched.append(bucket.number)
        return Pending([], pytest.fail)

    def come(self, index: int) -> None:
        self.params[index].grad = torch.ones(SMALL, device=torch.device("cpu"))
        self.current.arrived(index)


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "the last stream waits for no other": partial(mock.patch.object, StreamOrder, "of", return_value=None),
    "gradients are dropped too early": partial(
        mock.patch.object, ReducerBucket, "record_use", lambda *_: None
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_small_gradients_are_copied_behind_the_streams_of_all_and_kept_until_then(defect: str) -> None:
    with modelled_streams(checks=False) as model, DEFECTS[defect]():
        begun = Begun(3)
        for index in range(3):
            with model.using(model.new_stream()):
                begun.come(index)
        assert begun.launched == [0]
        for param in begun.params:
            param.grad = None
        assert bool(model.settle()) == (defect != "none")


def test_one_stream_costs_one_event_a_pass() -> None:
    with fake_streams() as accelerator:
        begun = Begun(6, 8 * SMALL)
        for index in reversed(range(6)):
            begun.come(index)
        assert begun.launched == [0, 1, 2]
        assert len(accelerator.events) == 1
        assert accelerator.used == []


def test_the_cpu_is_asked_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(streams, "current_stream", asked.append)
    begun = Begun(2)
    for index in range(2):
        begun.come(index)
    assert begun.launched == [0]
    assert not asked


# ---------------------- what the CPU waits for


class Branches(nn.Module):
    """Has a parameter more than the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.at_times = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) if dist.get_rank() == 0 else self.at_times(self.always(x))


def iterating(
    make: Callable[[], nn.Module], options: dict[str, Any], hook: bool = False
) -> Callable[[int], None]:
    model = DistributedDataParallel(make(), bucket_cap_mb=SMALL_MB, **options)
    assert model.reducer.own.defers_reports
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(number: int) -> None:
        optimizer.zero_grad()
        mlp_loss(model, number).backward()
        optimizer.step()

    return iterate


OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


@on_ranks(2)
def test_an_ordinary_iteration_waits_for_nothing() -> None:
    with cpu_as_accelerator():
        for options, hook in product(OPTIONS, (False, True)):
            iterate = iterating(mlp, options, hook)
            for number in range(4):  # until buckets are rebuilt
                iterate(number)
            with recorded() as calls:
                for number in range(4):
                    iterate(number)
            assert not calls, (options, hook, texts(calls))


@on_ranks(2)
def test_only_a_rank_that_left_parameters_unused_asks_who_used_them_and_once() -> None:
    with cpu_as_accelerator():
        iterate = iterating(Branches, {"find_unused_parameters": True})
        iterate(0)
        with recorded() as calls:
            iterate(1)
        assert len(calls) == (dist.get_rank() == 0), texts(calls)


@on_ranks(2)
def test_a_reducer_alone_waits_only_when_it_is_asked_for_the_last_report() -> None:
    with cpu_as_accelerator():
        net = mlp()
        reducer = Reducer(net.named_parameters())
        for number in range(3):
            mlp_loss(net, number).backward()
        with recorded() as calls:
            mlp_loss(net, 3).backward()
        assert not calls, texts(calls)
        with recorded() as calls:
            reducer.check_finished()
        assert [call.name for call in calls] == ["Event.synchronize"], texts(calls)


@on_ranks(2)
def test_passes_inside_join_are_read_at_once() -> None:
    with cpu_as_accelerator():
        model = DistributedDataParallel(mlp())
        mlp_loss(model, 0).backward()
        with Join([model]):
            for number in range(2 + dist.get_rank()):
                mlp_loss(model, number).backward()
        mlp_loss(model, 0).backward()
        model.check_finished()
        told = [param.grad for param in model.parameters()]
        assert all(bool(grad.isfinite().all()) for grad in told if grad is not None)
