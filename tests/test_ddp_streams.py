"""Gradients that come on several streams: who reads one waits for the stream it was made on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from fake_streams import fake_streams
from modelled import modelled_streams
from pool import on_ranks
from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.ddp import DistributedDataParallel
from zero_optim.ddp.reducer.assignment import History, ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.stream_order import StreamOrder
from zero_optim.shard.engine import Engine


class Begun:
    """A backward pass whose gradients come as they are told to, and the buckets that it launches."""

    def __init__(self, num_params: int) -> None:
        self.params = [torch.zeros(10, requires_grad=True) for _ in range(num_params)]
        self.launched: list[int] = []
        options = ReducerOptions(bucket_caps_nbytes=(2**30,))
        assignment = assign(ReducedParams.of([(str(param), param) for param in self.params]), options)
        self.current = BackwardPass(
            assignment, History(num_params), options, Engine(), self.launch, divisor=2.0
        )

    def launch(self, bucket: ReducerBucket) -> Any:
        self.launched.append(bucket.number)

    def come(self, index: int) -> None:
        self.params[index].grad = torch.ones(10, device=torch.device("cpu"))
        self.current.came(index)


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


def test_the_memory_of_a_sparse_gradient_is_kept_for_the_stream_that_reads_it() -> None:
    param = nn.Parameter(torch.zeros(5, 2))
    bucket = ReducerBucket([0], ReducedParams.of([("param", param)], ["param"]), ReducerOptions())
    grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2), check_invariants=True)
    param.grad = grad
    with fake_streams() as accelerator:
        bucket.record_use([0])
        assert accelerator.were_used_on("main", grad._indices(), grad._values())


@on_ranks(2)
def test_an_ordinary_iteration_waits_for_nothing() -> None:
    with cpu_as_accelerator():
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB, **options)
            assert model.reducer.own.defers_reports
            for number in range(4):  # until buckets are rebuilt
                mlp_loss(model, number).backward()
            with recorded() as calls:
                for number in range(4):
                    mlp_loss(model, number).backward()
            assert not calls, (options, texts(calls))


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
