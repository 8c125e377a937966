"""One backward pass: counts gradients, launches buckets, records failures.

Note [Phases of a backward pass]
    A `BackwardPass` lives from the first sign of a pass to its end. It is ``RUNNING`` while gradients come,
    and ``ENDING`` when the engine has called. If an exception ends the pass, it is ``BROKEN_OFF`` until the
    next forward or backward pass ends it, together with the other ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.streams import record_use
from zero_optim.ddp.reducer import report
from zero_optim.ddp.reducer.assignment import BucketAssignment
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.graph import accumulates
from zero_optim.ddp.reducer.reduction import BucketReductions, Launch
from zero_optim.ddp.reducer.report import FailureReport, PassTroubles
from zero_optim.ddp.reducer.stream_order import StreamOrder
from zero_optim.errors import ReductionError


class Phase(Enum):
    """See Note [Phases of a backward pass]."""

    RUNNING = "gradients come, and full buckets are launched"
    BROKEN_OFF = "an exception has ended it, and the other ranks have not been told"
    ENDING = "the rest is launched, and the results are handed out"


_UNCOUNTED = nullcontext()

# every: each parameter must get one gradient. some: it may get none. learning: nothing is known yet, so
# nothing is reduced before the end. learnt: each must get as many as in the pass that was there to learn.
Kind = Literal["every", "some", "learning", "learnt"]


@dataclass(frozen=True, slots=True)
class PassTerms:
    """What is fixed for a backward pass when it begins."""

    kind: Kind
    expected: Sequence[int]  # gradients of each parameter; 0 while that is learnt: whatever comes is unusual
    skips_unused: bool  # buckets that this rank did not use are not reduced
    failure_word_in_last_bucket: bool  # it waits for the end: Note [Word of a failure] in `report`
    divisor: float  # of the gradients; 1 where a comm hook divides
    carried: Sequence[bool]  # by parameter, whether it has a gradient from passes that were not reduced
    undefined: Sequence[int] = ()  # of a static graph: took part, but an ``autograd.Function`` gave None

    @property
    def asks_for_use(self) -> bool:
        """Whether ranks tell each other which parameters were used."""
        return self.kind in ("some", "learning")

    def report(self, group: RankGroup, failure: str | None, used: Sequence[bool]) -> FailureReport:
        """Start the report to the other ranks, after the last bucket; all call."""
        used = used if self.asks_for_use else ()
        return FailureReport(group, failure, used, in_last_bucket=self.failure_word_in_last_bucket)


class BackwardPass:
    """Counts gradients and launches buckets in order, each once it and all before it are full."""

    keeps_graph = False  # gradients are computed by a graph that autograd can go through again
    is_held = False  # full buckets wait for `launch_due` or `release`: Note [Places of launches]

    def __init__(
        self,
        assignment: BucketAssignment,
        terms: PassTerms,
        launch: Launch,
        held_up: AbstractContextManager[None] = _UNCOUNTED,
    ) -> None:
        self.phase = Phase.RUNNING
        self.terms = terms
        self.calls = [0] * len(assignment.names)  # how many gradients each parameter got
        self.order: list[int] = []  # parameters as their gradients came
        self.reductions = BucketReductions(assignment.buckets, launch)
        self._held_up = held_up  # entered where gradients are taken: the time is counted
        self._assignment = assignment
        self._expected = list(terms.expected)
        self._waiting = [len(bucket.indices) for bucket in assignment.buckets]  # gradients to come, by bucket
        self._set_aside: dict[int, Tensor] = {}  # gradients of parameters that perhaps no rank used
        self._troubles = PassTroubles()
        self._streams = StreamOrder.of(assignment.buckets[0].flat.device, len(assignment.buckets))

    # ------------------------------------------------------------------ phases

    def break_off(self) -> None:
        """Note that an exception has ended the pass; a second call does nothing."""
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.BROKEN_OFF
        self._troubles.note(report.BROKE_OFF)
        self.give_back(drops=True)  # before the user looks, or calls zero_grad()

    def end(self) -> None:
        """Note that no more gradients come; `launch_rest`, `report` and `give` follow, in this order."""
        assert self.phase is not Phase.ENDING, f"{Phase.ENDING} cannot follow {self.phase}"
        self.phase = Phase.ENDING

    def give_back(self, *, drops: bool) -> None:
        """See `ReducerBucket.give_back`."""
        for bucket in self._assignment.buckets:
            bucket.give_back(drops=drops)

    # ------------------------------------------------------------------ gradients come

    def note(self, text: str, index: int) -> None:
        """Note an error about a parameter's gradient: a text of `report`."""
        self._troubles.note(text, self._assignment.names[index])

    def arrived(self, index: int) -> None:
        """Note a parameter's gradient; called by its hook, hence quick."""
        calls = self.calls
        calls[index] += 1
        if calls[index] != self._expected[index]:
            self._unusual(index)
            return
        self.order.append(index)
        bucket, number, slot = self._assignment.places[index]
        streams = self._streams
        if streams is not None:
            streams.came(number)
        if slot in bucket.large_slots:
            with self._held_up:
                bucket.take_one(slot, self.terms.divisor)
        else:
            pending = bucket.pending
            pending.append(slot)
            if len(pending) >= bucket.batch_length:
                if streams is not None and streams.join(number):
                    bucket.record_use(pending)
                with self._held_up:
                    bucket.take_pending(self.terms.divisor)
        waiting = self._waiting
        waiting[number] -= 1
        if not waiting[number]:
            with self._held_up:
                self._launch_full()

    def _unusual(self, index: int) -> None:
        """Handle a gradient that was not expected."""
        bucket, number, slot = self._assignment.places[index]
        if self._streams is not None:
            self._streams.came(number)
        if self.terms.kind == "learning":
            if self.calls[index] == 1:
                self.order.append(index)
        elif self.terms.kind == "learnt":
            if self.calls[index] > self._expected[index]:
                self.note(report.MORE, index)
        elif self._expected[index] or self.calls[index] > 1:
            self.note(report.TWICE, index)
        elif number < self.reductions.num_passed:
            self.note(report.LATE_GRADIENT, index)
        else:
            bucket.pending.append(slot)

    def presume_unused(self, indices: Sequence[int]) -> None:
        """Do not wait for some parameters' gradients; call before any has come."""
        for index in indices:
            self._expected[index] = 0  # whatever comes is unusual
            self._waiting[self._assignment.places[index][1]] -= 1
        if indices:
            self._launch_full()

    @property
    def _num_early(self) -> int:
        """How many buckets are launched when full; the others at the end of the pass."""
        return len(self._waiting) - self.terms.failure_word_in_last_bucket

    def _launch_full(self) -> None:
        """Launch full buckets, up to the first that is not full."""
        if self.is_held:
            return
        num_early, reductions = self._num_early, self.reductions
        while reductions.num_passed < num_early and not self._waiting[reductions.num_passed]:
            self._launch_next()

    def launch_due(self, is_due: Callable[[int], bool]) -> None:
        """Launch, in order, the buckets whose number is due, up to the first that expects a gradient."""
        reductions = self.reductions
        while reductions.num_passed < self._num_early and is_due(reductions.num_passed):
            bucket = self._assignment.buckets[reductions.num_passed]
            is_to_come = any(
                self.calls[index] < self._expected[index] and accumulates(param)
                for index, param in zip(bucket.indices, bucket.params, strict=True)
            )
            if self.terms.kind == "learning" or is_to_come:
                return
            with self._held_up:
                self._launch_next()

    def release(self) -> None:
        """From now on, launch buckets as soon as they are full."""
        self.is_held = False
        with self._held_up:
            self._launch_full()

    def _launch_next(self) -> None:
        number = self.reductions.num_passed
        bucket = self._assignment.buckets[number]
        used = list(map(self.calls.__getitem__, bucket.indices))
        if self.terms.skips_unused and not any(used):
            self.reductions.leave_out_next()
            return
        if self._streams is not None and self._streams.join(number):
            bucket.record_use(range(len(bucket.params)))
        self._take_rest(bucket, used)
        for slot in bucket.pop_misfits():
            self.note(report.DENSE if bucket.is_sparse else report.SPARSE, bucket.indices[slot])
        if number == self._num_early and self._troubles:
            bucket.write_failure_word()  # the last, at the end: nothing more can go wrong
        self.reductions.launch_next()

    def _take_rest(self, bucket: ReducerBucket, used: Sequence[int]) -> None:
        """Copy what was not copied yet, with zeros for missing gradients."""
        rest: Sequence[int] = ()
        if self.terms.kind == "learning":
            rest = range(len(used))
        elif 0 in used:
            rest = [slot for slot, count in enumerate(used) if not count]
        for slot in rest:
            if not used[slot] and bucket.is_inside(slot):
                self._set_aside[bucket.indices[slot]] = bucket.views[slot].clone()  # in case nobody used it
        bucket.take_pending(self.terms.divisor)
        if rest:
            bucket.take(rest, self.terms.divisor)

    # ------------------------------------------------------------------ the end

    def launch_rest(self) -> None:
        """Launch every other bucket, with the gradients that have come."""
        self._check_complete()
        while self.reductions.num_passed < len(self._waiting):
            self._launch_next()

    def _check_complete(self) -> None:
        if self.terms.kind not in ("every", "learnt"):
            return
        if self.calls != self._expected:
            for index, (calls, expected) in enumerate(zip(self.calls, self._expected, strict=True)):
                if calls < expected and not self.terms.carried[index]:
                    self.note(report.FEWER if self.terms.kind == "learnt" else report.NO_GRADIENT, index)
        for index in self.terms.undefined:  # would be handed out as it came, not reduced
            if self._has_gradient(index):
                self.note(report.MORE, index)

    def _has_gradient(self, index: int) -> bool:
        bucket, _, slot = self._assignment.places[index]
        return bucket.has_gradient(slot)

    def report(self, group: RankGroup) -> FailureReport:
        """Report failures and used parameters to the other ranks, after the last bucket; all call."""
        used: list[bool] = []
        if self.terms.asks_for_use:
            used = [
                self.terms.carried[index] or (calls > 0 and self._has_gradient(index))
                for index, calls in enumerate(self.calls)
            ]
        return self.terms.report(group, self._troubles.message(), used)

    def check(self, report_to_come: FailureReport) -> None:
        """Raise ReductionError on every rank if one failed, before results are handed out; all ranks call."""
        try:
            if report_to_come.in_last_bucket:
                self.reductions.drain(report_to_come)
            report_to_come.check()
        except ReductionError:
            self.reductions.drain()
            raise

    def give(self, unused: Sequence[bool], report_to_come: FailureReport | None = None) -> None:
        """Wait for every bucket, and hand out the reduced gradients, except for unused parameters."""
        for bucket, reduced in self.reductions.results(report_to_come):
            bucket.give(reduced, unused)
            for slot, index in enumerate(bucket.indices if self._set_aside else ()):
                if unused[index] and index in self._set_aside:
                    bucket.views[slot].copy_(self._set_aside[index])
                    record_use(self._set_aside[index])

    def drop(self, report_to_come: FailureReport) -> None:
        """Wait for every bucket, but leave the parameters' gradients alone, or zero."""
        for bucket, _ in self.reductions.results(report_to_come):
            bucket.clear()


class PassWithGraph(BackwardPass):
    """A backward pass with ``create_graph=True``; its own operations stay out of the graph."""

    keeps_graph = True

    @torch.no_grad()
    def arrived(self, index: int) -> None:
        """See `BackwardPass.arrived`."""
        super().arrived(index)
