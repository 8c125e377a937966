"""Gradients that come on several streams: who reads one waits for the stream it was made on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from modelled.clocks import Clocks, Event, Stream
from zero_optim.compat import streams
from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.history import History
from zero_optim.ddp.reducer.reduction import Reduction


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


class Nothing:
    def wait(self) -> Tensor:
        raise AssertionError


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
        terms = History(len(numels)).terms(options, 2, can_carry_word=False)
        self.current = BackwardPass(self.assignment, terms, self.launch)

    def launch(self, bucket: ReducerBucket, number: int, is_last: bool) -> Reduction:
        self.read(bucket.indices)
        self.launched.append(number)
        return Nothing()

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


LARGE = 2**15 // 4
SMALL = 10


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("order", ["aab", "aba", "abb", "abc", "abab"])
def test_a_launch_waits_for_every_stream_on_which_gradients_came(
    accelerator: Accelerator, numel: int, order: str
) -> None:
    watched = Watched(accelerator, [numel] * len(order))
    named = {name: accelerator.clocks.new_stream() for name in order}
    for index, name in enumerate(order):
        watched.come(index, named[name])
    assert watched.launched == [0]


def test_a_bucket_that_waited_for_the_one_before_is_launched_behind_its_own_streams(
    accelerator: Accelerator,
) -> None:
    watched = Watched(accelerator, [SMALL] * 4, 8 * SMALL)
    first, second = watched.assignment.buckets
    one, other = (accelerator.clocks.new_stream() for _ in range(2))
    for index in second.indices:
        watched.come(index, one)
    assert watched.launched == []
    for index in first.indices:
        watched.come(index, other)
    assert watched.launched == [0, 1]


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


def test_what_ends_a_pass_waits_for_the_streams_of_gradients_that_were_not_launched(
    accelerator: Accelerator,
) -> None:
    watched = Watched(accelerator, [SMALL] * 3)
    watched.come(0, accelerator.clocks.new_stream())
    watched.come(1, accelerator.clocks.new_stream())
    watched.current.end()
    watched.current.launch_rest()
    assert watched.launched == [0]


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
