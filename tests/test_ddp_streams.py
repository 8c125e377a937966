"""Gradients that come on several streams: who reads one waits for the stream it was made on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from modelled.clocks import Clocks, Event, Stream
from pool import on_ranks
from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.compat import streams
from zero_optim.ddp import DistributedDataParallel, Reducer
from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.history import History
from zero_optim.ddp.reducer.reduction import Wait
from zero_optim.hooks import allreduce_hook


@dataclass(frozen=True)
class Moment:
    """A piece of work on a stream."""

    stream: Stream
    tick: int

    @classmethod
    def on(cls, stream: Stream) -> "Moment":
        return cls(stream, stream.tick())

    def is_before(self, stream: Stream) -> bool:
        return stream.sees({self.stream.number: self.tick})


@dataclass(frozen=True)
class Accelerator(streams.Accelerator):
    """Streams that are never ahead of what they are known to have waited for."""

    module: Any = None
    clocks: Clocks = field(default_factory=Clocks)
    num_events: list[int] = field(default_factory=lambda: [0])
    uses: list[tuple[int, Stream]] = field(default_factory=list)

    def current_stream(self, device: torch.device) -> Stream:
        return self.clocks.current

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        return self.clocks.using(stream)

    def recorded_event(self, device: torch.device) -> Event:
        self.num_events[0] += 1
        return self.clocks.current.record_event()

    def record_use(self, tensor: Tensor) -> None:
        self.uses.append((id(tensor), self.clocks.current))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    made = Accelerator()
    monkeypatch.setattr(streams, "accelerator_of", lambda _: made)
    return made


class Watched:
    """A backward pass whose gradients come as they are told to, and who sees them read too early."""

    def __init__(self, accelerator: Accelerator, numels: Sequence[int], *caps: int) -> None:
        self.accelerator = accelerator
        self.params = [torch.zeros(numel, requires_grad=True) for numel in numels]
        options = ReducerOptions(bucket_caps_nbytes=caps or (2**30,), limits_first_buckets=True)
        self.begun = Moment.on(accelerator.clocks.current)  # buckets are filled with zeros
        self.assignment = assign(ReducedParams.of(self.params), options)
        self.made: dict[int, Moment] = {}
        self.launched: list[int] = []
        history = History(len(numels))
        self.current = BackwardPass(self.assignment, history, options, self.launch, divisor=2.0)

    def launch(self, bucket: ReducerBucket) -> Wait:
        self.read(bucket.indices)
        self.launched.append(bucket.number)
        return pytest.fail

    def read(self, indices: Sequence[int]) -> None:
        current = self.accelerator.clocks.current
        assert all(self.made[index].is_before(current) for index in indices if index in self.made)

    def come(self, index: int, stream: Stream) -> int:
        """Have a gradient come on a stream; give its id."""
        with self.accelerator.using(stream):
            grad = self.params[index].grad = torch.ones_like(self.params[index])
            self.made[index] = Moment.on(stream)
            self.current.arrived(index)
            assert self.begun.is_before(stream)
            stream.tick()
            return id(grad)


SMALL = 10


def test_small_gradients_are_copied_behind_the_streams_of_all_and_kept_until_then(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(accelerator, [SMALL] * 3)
    copied = []
    original = ReducerBucket.take

    def take(bucket: ReducerBucket, slots: Sequence[int], divisor: float) -> None:
        watched.read([bucket.indices[slot] for slot in slots])
        copied.extend(slots)
        original(bucket, slots, divisor)

    monkeypatch.setattr(ReducerBucket, "take", take)
    beside = [accelerator.clocks.new_stream() for _ in range(3)]
    grads = [watched.come(index, stream) for index, stream in enumerate(beside)]
    assert len(copied) == 3
    assert set(accelerator.uses) == {(grad, beside[-1]) for grad in grads}


def test_one_stream_costs_one_event_a_pass(accelerator: Accelerator) -> None:
    watched = Watched(accelerator, [SMALL] * 6, 8 * SMALL)
    for index in reversed(range(6)):
        watched.come(index, accelerator.clocks.default)
    assert watched.launched == [0, 1, 2]
    assert accelerator.num_events == [1]
    assert accelerator.uses == []


def test_the_cpu_is_asked_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(streams, "current_stream", asked.append)
    watched = Watched(Accelerator(), [SMALL] * 2)
    for index in range(2):
        watched.params[index].grad = torch.ones(SMALL)
        watched.current.arrived(index)
    assert watched.launched == [0]
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
