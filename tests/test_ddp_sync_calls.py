"""In an ordinary iteration the CPU waits neither for the pass nor for what ranks tell each other."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from pool import on_ranks
from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.ddp import DistributedDataParallel, Reducer
from zero_optim.hooks import allreduce_hook


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
