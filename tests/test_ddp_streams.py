"""Gradients of several streams; what a pass on an accelerator waits for."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from fake_streams import fake_streams
from pool import on_ranks
from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.ddp import DistributedDataParallel
from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions, assign


def test_the_memory_of_a_sparse_gradient_is_kept_for_the_stream_that_reads_it() -> None:
    param = nn.Parameter(torch.zeros(5, 2))
    (bucket,) = assign(ReducedParams.of([("param", param)], ["param"]), ReducerOptions()).buckets
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
