"""One backward pass: counts gradients, launches buckets, records failures.

Note [Streams of a backward pass]
    A parameter's hook runs on the stream on which the forward pass first used the parameter, so gradients of
    a bucket may come on several. The hook that copies small ones, or launches the bucket, waits for all of
    them, and records its use. Each stream first waits for the beginning of the pass. The engine has the
    stream of ``backward()`` wait for all others. Events are recorded when the stream changes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat import streams
from zero_optim.compat.streams import is_asynchronous
from zero_optim.ddp.reducer import report
from zero_optim.ddp.reducer.assignment import BucketAssignment, History, ReducerOptions
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.graph import accumulates
from zero_optim.ddp.reducer.reduction import Launch, Launched
from zero_optim.ddp.reducer.report import FailureNotes, FailureReport
from zero_optim.flow.schedule import Moment
from zero_optim.shard.engine import Engine
from zero_optim.shard.task import Task


class Phase(Enum):
    """The phases of a backward pass. The next pass ends one that broke off, together with the other ranks."""

    RUNNING = "gradients come, and full buckets are launched"
    BROKEN_OFF = "an exception has ended it, and the other ranks have not been told"
    ENDING = "the rest is launched, and the results are handed out"


class StreamOrder:
    """Makes a bucket wait for the streams of its gradients. Made where the pass begins, on its stream."""

    def __init__(self, device: torch.device, num_buckets: int) -> None:
        self._device = device
        self._begun = streams.recorded_event(device)
        self._behind_begin = [streams.current_stream(device)]  # streams that come behind the beginning
        self._last: list[streams.Stream | None] = [None] * num_buckets  # by bucket, the stream used last
        self._others: list[dict[streams.Stream, streams.Event]] = [{} for _ in range(num_buckets)]

    def came(self, number: int) -> None:
        """Note, before its copy, that a gradient of a bucket has come on the current stream."""
        stream = streams.current_stream(self._device)
        if stream == self._last[number]:
            return
        if stream not in self._behind_begin:
            streams.wait_for_event(self._device, self._begun)
            self._behind_begin.append(stream)
        last, self._last[number] = self._last[number], stream
        others = self._others[number]
        others.pop(stream, None)  # what this stream was given before comes first anyway
        if last is not None:
            with streams.using_stream(self._device, last):
                others[last] = streams.recorded_event(self._device)

    def join(self, number: int) -> bool:
        """Make the current stream wait for the others of a bucket; return whether there were any."""
        self.came(number)
        others = self._others[number]
        if not others:
            return False
        for event in others.values():
            streams.wait_for_event(self._device, event)
        self._others[number] = {}
        return True


class BackwardPass(Task):
    """Counts gradients and launches buckets in order, each once it and all before it are full."""

    keeps_graph = False  # gradients are computed by a graph that autograd can go through again
    is_empty = False  # this rank has no gradients for it, see `launch_zeros`

    def __init__(
        self,
        assignment: BucketAssignment,
        history: History,
        options: ReducerOptions,
        engine: Engine,  # runs the rows of full buckets
        launch: Launch,
        *,
        divisor: float,  # of the gradients; 1 where a comm hook divides
        can_carry_word: bool,  # the last bucket can tell of a failure; then it waits for the end
        held_up: AbstractContextManager[None],  # times what is done with gradients
    ) -> None:
        buckets = assignment.buckets
        self.phase = Phase.RUNNING
        self.kind = history.kind(options)
        self.asks_for_use = self.kind in ("some", "learning")  # ranks tell each other what they used
        self.skips_unused = options.skip_all_reduce_unused_params and self.kind == "some"
        self._is_held = False  # full buckets wait for `launch_due` or `release`
        self.calls = [0] * len(assignment.names)  # how many gradients each parameter got
        self.order: list[int] = []  # parameters as their gradients came
        self.num_passed = 0  # buckets that were launched or left out: the number of the next
        self._assignment = assignment
        self._places = assignment.places
        self._engine, self._launch = engine, launch
        self.launched = Launched()
        self._divisor = divisor
        self.held_up = held_up
        # 0 while that is learnt: whatever comes is unusual
        expected = history.learnt or [0 if self.kind == "learning" else 1] * len(self.calls)
        self._expected = list(expected)
        self._undefined = history.undefined
        self._carried: Sequence[bool] = [False] * len(self.calls)  # see `complete`
        self.has_word = can_carry_word and self.kind in ("every", "learnt")
        self._num_early = len(buckets) - self.has_word  # buckets that are launched when full
        self._waiting = [len(bucket.indices) for bucket in buckets]  # gradients to come, by bucket
        self._set_aside: dict[int, Tensor] = {}  # gradients of parameters that perhaps no rank used
        self.failures = FailureNotes(assignment.names)
        self._pending = defaultdict[int, list[int]](list)  # by bucket, slots of gradients not copied yet
        device = buckets[0].params[0].device
        self._streams = StreamOrder(device, len(buckets)) if is_asynchronous(device) else None

    # ------------------------------------------------------------------ phases and failures

    def break_off(self) -> None:
        """Note that an exception has ended the pass; a second call does nothing."""
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.BROKEN_OFF
        self.failures.add(report.BROKE_OFF)
        self.give_back(drops=True)  # before the user looks, or calls zero_grad()

    def give_back(self, *, drops: bool) -> None:
        """See `BucketGradients.give_back`."""
        for bucket in self._assignment.buckets:
            if bucket.members.give_back(drops=drops):
                bucket.storage.free()

    # ------------------------------------------------------------------ gradients come

    def came(self, index: int) -> None:
        """Note a parameter's gradient; called by its hook, hence quick."""
        calls = self.calls
        calls[index] += 1
        if calls[index] != self._expected[index]:
            self._unusual(index)
            return
        self.order.append(index)
        bucket, slot = self._places[index]
        number, order = bucket.number, self._streams
        if order is not None:
            order.came(number)
        if slot in bucket.large_slots:
            with self.held_up:
                bucket.storage.take((slot,), self._divisor)
        else:
            pending = self._pending[number]
            pending.append(slot)
            if len(pending) >= bucket.batch_length:
                if order is not None and order.join(number):
                    bucket.record_use(pending)
                with self.held_up:
                    self.take_pending(bucket)
        waiting = self._waiting
        waiting[number] -= 1
        if not waiting[number]:
            with self.held_up:
                self._launch_full()

    def _unusual(self, index: int) -> None:
        bucket, slot = self._places[index]
        calls, expected = self.calls[index], self._expected[index]
        if self._streams is not None:
            self._streams.came(bucket.number)
        if self.kind == "learning":
            if calls == 1:
                self.order.append(index)
        elif self.kind == "learnt":
            if calls > expected:
                self.failures.add(report.MORE, index)
        elif expected or calls > 1:
            self.failures.add(report.TWICE, index)
        elif bucket.number < self.num_passed:
            self.failures.add(report.LATE_GRADIENT, index)
        else:
            self._pending[bucket.number].append(slot)

    def presume_unused(self, indices: Sequence[int]) -> None:
        """Do not wait for some parameters' gradients; call before any has come."""
        for index in indices:
            self._expected[index] = 0  # whatever comes is unusual
            self._waiting[self._places[index][0].number] -= 1
        if indices:
            self._launch_full()

    # ------------------------------------------------------------------ buckets go

    def _launch_full(self) -> None:
        while not self._is_held and self.num_passed < self._num_early and not self._waiting[self.num_passed]:
            self._launch_next()

    def hold(self) -> None:
        """Launch full buckets by `launch_due`, until `release`: Note [Places of launches]."""
        self._is_held = True

    def launch_due(self, is_due: Callable[[int], bool]) -> None:
        """Launch the buckets that are due, in order, up to the first that expects a gradient."""
        while self.num_passed < self._num_early and is_due(self.num_passed):
            bucket = self._assignment.buckets[self.num_passed]
            is_to_come = any(
                self.calls[index] < self._expected[index] and accumulates(param)
                for index, param in zip(bucket.indices, bucket.params, strict=True)
            )
            if self.kind == "learning" or is_to_come:
                return
            with self.held_up:
                self._launch_next()

    def release(self) -> None:
        """From now on, launch buckets as soon as they are full."""
        self._is_held = False
        with self.held_up:
            self._launch_full()

    def _launch_next(self) -> None:
        number = self.num_passed
        bucket = self._assignment.buckets[number]
        used = list(map(self.calls.__getitem__, bucket.indices))
        if self.skips_unused and not any(used):
            self.num_passed += 1
            return
        if self._streams is not None and self._streams.join(number):
            bucket.record_use(range(len(bucket.params)))
        self._take_rest(bucket, used)
        members = bucket.members
        for slot in members.pop_misfits():
            self.failures.add(report.DENSE if members.is_sparse else report.SPARSE, members.indices[slot])
        self._reduce_next()

    def _take_rest(self, bucket: ReducerBucket, used: Sequence[int]) -> None:
        rest: Sequence[int] = ()
        if self.kind == "learning":
            rest = range(len(used))
        elif 0 in used:
            rest = [slot for slot, count in enumerate(used) if not count]
        storage = bucket.storage
        for slot in rest if storage.as_views else ():
            if not used[slot] and bucket.params[slot].grad is storage.views[slot]:
                self._set_aside[bucket.indices[slot]] = storage.views[slot].clone()  # in case nobody used it
        self.take_pending(bucket)
        if rest:
            storage.take(rest, self._divisor)

    def take_pending(self, bucket: ReducerBucket) -> None:
        """Copy gradients of a bucket that have come since, divided."""
        bucket.storage.take(self._pending.pop(bucket.number, ()), self._divisor)

    def _reduce_next(self) -> None:
        self._engine.on(Moment.BUCKET_FULL, [self._assignment.buckets[self.num_passed]], self)
        self.num_passed += 1

    def reduce(self, bucket: ReducerBucket) -> None:
        """Start the reduction of a bucket; the engine calls."""
        # Of the last one, at the end: nothing more can go wrong.
        has_failed = bucket.number == self._num_early and bool(self.failures)
        self.launched.append((bucket, self._launch(bucket, has_failed)))

    def launch_zeros(self, last_order: Sequence[int]) -> None:
        """Launch all buckets as they are; the other ranks use what was used in the last pass."""
        self.is_empty, used = True, frozenset(last_order)
        for bucket in self._assignment.buckets:
            if self.skips_unused and used.isdisjoint(bucket.indices):
                self.num_passed += 1
            else:
                self._reduce_next()

    # ------------------------------------------------------------------ the end

    def complete(self, carried: Sequence[bool]) -> None:
        """Launch the rest; ``carried``: by parameter, it has a gradient of a pass that was not reduced."""
        self._carried = carried
        assert self.phase is not Phase.ENDING, "a pass ends once"
        self.phase = Phase.ENDING
        if self.kind in ("every", "learnt") and self.calls != self._expected:
            for index, (calls, expected) in enumerate(zip(self.calls, self._expected, strict=True)):
                if calls < expected and not self._carried[index] and not self.failures.has(index):
                    self.failures.add(report.FEWER if self.kind == "learnt" else report.NO_GRADIENT, index)
        for index in self._undefined if self.kind == "learnt" else ():
            if self._has_gradient(index):  # would be handed out as it came, not reduced
                self.failures.add(report.MORE, index)
        while self.num_passed < len(self._waiting):
            self._launch_next()

    def _has_gradient(self, index: int) -> bool:
        bucket, slot = self._places[index]
        return bucket.members.has_gradient(slot)

    def report(self, group: RankGroup) -> FailureReport:
        """Send failures and used parameters, after the last bucket; all ranks call."""
        used: list[bool] = []
        if self.asks_for_use:
            used = [
                self._carried[index] or (calls > 0 and self._has_gradient(index))
                for index, calls in enumerate(self.calls)
            ]
        return FailureReport(group, self.failures.text(), used, in_last_bucket=self.has_word)

    def give(self, unused: Sequence[bool], report: FailureReport) -> None:
        """Wait for every bucket, and hand out the gradients of used parameters."""
        for bucket, reduced in self.launched.results(report):
            if not self.is_empty:
                bucket.storage.give(reduced, unused)
            for slot, index in enumerate(bucket.indices if self._set_aside else ()):
                if unused[index] and index in self._set_aside:
                    bucket.storage.views[slot].copy_(self._set_aside[index])
                    streams.record_use(self._set_aside[index])


class PassWithGraph(BackwardPass):
    """A backward pass with ``create_graph=True``, which stays out of the graph."""

    keeps_graph = True

    @torch.no_grad()
    def came(self, index: int) -> None:
        """Note a parameter's gradient."""
        super().came(index)
