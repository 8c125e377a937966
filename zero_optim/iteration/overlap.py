"""The overlapped step: a comm hook steps a bucket once its gradients are reduced, and starts its gather.

On gloo with CPU parameters the thread "zero_step" calls `Overlap.step`, bucket by bucket; elsewhere the
thread of the backward pass, in the next bucket's hook: Note [A thread or none] in `zero_optim.hooks.passes`.
``step()`` steps the rest. The optimizer's owners and buckets never change, so DDP may rebuild its buckets.
"""

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from zero_optim.comm.lanes import Lease, lanes_beside, may_run_beside
from zero_optim.comm.work_log import OVERLAPPED_STEP
from zero_optim.compat.streams import StreamBeside
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.flow.flow import Flow, Worker
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import Moment
from zero_optim.iteration.joins import Joins
from zero_optim.plan.groups import ParamGroup, params_of
from zero_optim.shard.bucket import Bucket, Values
from zero_optim.shard.gathers import start_gather, start_header
from zero_optim.shard.task import Task
from zero_optim.state.core import Core

PARTS = 8  # full buckets are stepped when they have such a part of the rest


@dataclass(slots=True, eq=False)
class OverlappedStep:
    """One step during a backward pass, from its first bucket to ``step()`` or the next pass."""

    num_passes: int  # since ``step()``, this one included
    lends: bool  # ``step()`` lends joined ranks gradients
    in_backward: bool = True
    has_failed: bool = False
    stepped: dict[Tensor, None] = field(default_factory=dict)  # by any owner
    seen: list[tuple[Tensor, int, int]] = field(default_factory=list)  # identity and version of gradients
    earlier: Exception | None = None  # the previous step's error, raised when this pass ends

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """Record the pass's end; if ``is_final``, ``step()`` refuses later changes of gradients."""
        self.in_backward = False
        if failed:
            self.fail()
        if is_final:
            self.seen = [(p, id(p.grad), p.grad._version) for p in self.stepped if p.grad is not None]

    def fail(self) -> None:
        """Record that the backward pass raises, here or on another rank."""
        self.num_passes -= not self.has_failed
        self.has_failed = True

    def check_asked(self, late: str) -> None:
        """Raise RuntimeError for a late call, several passes, or gradients changed or gone in part."""
        if late:
            raise RuntimeError(
                f"the step was taken during the backward pass, too early for {late}: leave it out, or "
                "leave out zero_step (overlap_with_ddp). bfloat16 needs no GradScaler"
            )
        self.check_passes()
        num_gone = sum(param.grad is None for param, _, _ in self.seen)
        is_changed = any(
            param.grad is not None and (id(param.grad) != identity or param.grad._version != version)
            for param, identity, version in self.seen
        )
        if is_changed or 0 < num_gone < len(self.seen):
            what = "changed, clipped or unscaled perhaps," if is_changed else "taken from some parameters"
            raise RuntimeError(
                f"gradients were {what} after the step had been taken with them during the backward pass. "
                "That cannot have an effect: leave it out, or leave out zero_step (overlap_with_ddp)"
            )

    def check_passes(self) -> None:
        """Raise RuntimeError for a second backward pass before ``step()``."""
        if self.num_passes > 1:
            raise RuntimeError(
                f"{self.num_passes} backward passes were reduced before step(), and each was stepped with "
                "the gradients added up so far. Put all but the last backward pass of a step under no_sync()"
            )

    def rest(self, groups: Sequence[ParamGroup]) -> list[Tensor]:
        """Return what ``step()`` must still step: what trains or has a gradient; equal on every rank."""
        left = [param for param in params_of(groups) if param not in self.stepped]
        return [param for param in left if param.requires_grad or param.grad is not None]


class Overlap:
    """Steps buckets during the backward pass, and gathers them; all ranks make its calls in one order."""

    def __init__(self, core: Core, joins: Joins) -> None:
        self.group = core.group
        self.takes_thread = may_run_beside(core.group, core.sharding.pieces)
        group = core.group.during("gather")
        self.lanes = lanes_beside(group) if self.takes_thread else Lease.of(group)
        self.current: OverlappedStep | None = None  # not finished
        self.streams = StreamBeside()
        worker = Worker("zero_step") if self.takes_thread else None
        self.under_way = Flow(1 if worker is None else math.inf, streams=self.streams, thread=worker)
        self.stepping = threading.RLock()  # held by who steps, or resets gradients, with which a thread steps
        self.core = core
        self._joins = joins
        self._trained: list[frozenset[Tensor]] = []
        self._loop_calls_step = False
        self._stepped: dict[Tensor, None] = {}  # not gathered yet; perhaps at an earlier moment
        # What this pass has not gathered, with bytes to step: the header goes with the last one.
        self._left: dict[Bucket[Values], int] = {}

    def release(self, *, waits: bool) -> bool:
        """Release the process groups, after steps if it ``waits``; return whether only some were stepped."""
        try:
            if waits:
                self.wait_for_steps()
            is_left = bool(self.under_way)
        except RuntimeError:  # of the backend
            self.lanes.abandon()
            is_left = True
        self.under_way = Flow()  # which ends the thread
        current, self.current = self.current, None
        self.group = self.group.release()
        self.lanes = Lease.of(self.group)
        if current is None:
            return is_left
        return is_left or current.has_failed or current.in_backward or bool(current.rest(self.core.groups))

    # ------------------------------------------------------------------ during the backward pass

    def begin_pass(self) -> None:
        """Begin a backward pass, of which the last gather tells what failed, when no step is under way."""
        buckets = self.core.engine.buckets
        self._left = {each: each.nbytes * any(p.requires_grad for p in each.params) for each in buckets}

    def begin(self, *, joined: bool) -> None:
        """Begin a step: Note [Moving parameters] in `whole_values`. Raises if the last pass broke off."""
        core, lends = self.core, self._joins.under_way
        core.group.phase.traffic.count_step()
        lane, has_begun = self.lanes.groups[0], False

        def end(_: object, failure: BaseException | None, __: object) -> None:
            if lends:
                self._joins.exchange_and_lend(lane, [], joined=joined)
            if has_begun:  # else gathers may be under way to parameters that this pass has read
                call = core.call("backward()", failure)
                core.engine.begin_call(core.groups, call)
                assert self.current is not None  # it has begun
                try:
                    core.engine.compare_calls(lane.during("agree"), call, with_last=False)
                except (RemoteRankError, RankMismatchError) as error:
                    self.current.earlier = error  # raised when this pass has ended, for which others wait

        with ExitStack() as at_end:
            at_end.push(end)  # with an error too: the other ranks wait for it
            last, self._trained = self.current, []  # parameters may be frozen, or trained again
            broke_off = last is not None and last.in_backward
            self.current = OverlappedStep((last.num_passes if last else 0) + (not broke_off), lends)
            if self._loop_calls_step:
                self.current.check_passes()
            under_way = core.engine.under_way
            if broke_off and under_way.is_unclaimed and not joined:
                raise RuntimeError(
                    "the last backward pass failed after part of its step had been taken, and the forward "
                    "pass after it may have read old and new parameters: call "
                    "optimizer.wait_for_gathers() before training goes on"
                )
            under_way.wait()
            has_begun = True
            core.prepare()

    def wait_for_steps(self) -> None:
        """Wait, with the current stream, for steps on another thread or stream."""
        # Without a thread these calls do the work themselves and count its waits.
        exposed = bool(self.under_way) and self.takes_thread
        with self.group.during("reduce", is_exposed=exposed).phase:
            self.under_way.wait()

    def trained(self, number: int) -> frozenset[Tensor]:
        """Return a bucket's parameters that train in this pass, or all if none does."""
        for bucket in self.core.engine.buckets[len(self._trained) :]:
            trained = frozenset(param for param in bucket.params if param.requires_grad)
            self._trained.append(trained or frozenset(bucket.params))
        return self._trained[number]

    def is_worth_a_step(self, numbers: Collection[int]) -> bool:
        """Whether to step full buckets now: on a thread, or if they are a large part of the rest."""
        if self.takes_thread:
            return True
        nbytes = sum(self.core.engine.buckets[number].nbytes for number in numbers)
        return PARTS * nbytes >= sum(self._left.values())

    def step(
        self,
        gradients: Mapping[Tensor, Tensor | None],
        failure: BaseException | None = None,  # of this rank so far
        moment: Moment = Moment.BUCKET_REDUCED,  # at others all buckets are waited for
    ) -> None:
        """Step parameters that have a gradient, and run their buckets' rows; others receive the failure."""
        engine, ends = self.core.engine, moment is not Moment.BUCKET_REDUCED
        if self.current is not None:
            self.current.stepped.update(dict.fromkeys(gradients))
        task = PartTask(self, gradients, failure, checks=ends)
        engine.on(moment, engine.buckets if ends else engine.buckets_of(gradients), task)

    def note_stepped(self, params: Iterable[Tensor]) -> None:
        """Record parameters that the next gather brings."""
        self._stepped.update(dict.fromkeys(params))

    def take_stepped(
        self, buckets: Sequence[Bucket[Values]]
    ) -> tuple[list[Bucket[Values]], frozenset[Tensor], bool]:
        """Return those of some buckets that were stepped, the parameters, and whether the pass has no others.

        All are gathered now.
        """
        changed = frozenset(self._stepped)  # the pass still reads frozen ones
        self._stepped.clear()
        stepped = [bucket for bucket in self.core.engine.buckets_of(changed) if bucket in buckets]
        for bucket in stepped:
            self._left.pop(bucket, None)
        return stepped, changed, not self._left

    def send_header(self) -> None:
        """Tell the other ranks what failed in a pass, unless its last gather has; all ranks call."""
        engine = self.core.engine
        if self._left and (header := engine.header()) is not None:
            lane, device = self.lanes.groups[0], engine.buckets[0].device
            engine.under_way.start(partial(start_header, lane, header, device), keys=engine.buckets)

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """End a backward pass: wait for gathers that no forward pass waits for."""
        assert self.current is not None  # begun by the first bucket of the pass
        self.current.end_backward(is_final=is_final, failed=failed)
        earlier, self.current.earlier = self.current.earlier, None
        self.send_header()
        try:
            self.step({}, moment=Moment.AFTER_BACKWARD)
        except RemoteRankError:
            self.current.fail()  # as on the rank that failed
            raise
        if earlier is not None and not failed:
            self.current.fail()
            raise earlier

    # ------------------------------------------------------------------ in step()

    def finish(self, late: str, *, joined: bool) -> None:
        """Step what the backward pass did not reach; all ranks call. ``late``: a call that came too late."""
        engine = self.core.engine
        self.wait_for_steps()  # on a rank that joined no backward pass has ended and done so
        lane = self.lanes.groups[0].during("agree")

        def end(_: object, failure: BaseException | None, __: object) -> None:
            engine.compare_calls(lane, self.core.call("step()", failure), with_last=True)

        with ExitStack() as at_end:
            at_end.push(end)  # with an error too: the other ranks wait for it
            try:
                self._step_rest(late, joined=joined)
            finally:
                self._loop_calls_step = True
                self.current = None
        if self._joins.under_way:
            self._joins.end_step()

    def _step_rest(self, late: str, *, joined: bool) -> None:
        core, in_join, current = self.core, self._joins.under_way, self.current
        assert current is not None  # asked for by the caller
        # A parameter put into a group by hand is in no bucket; the next pass refuses it.
        rest = core.engine.known_of(current.rest(core.groups))
        failure: Exception | None = None
        try:
            if not joined:
                current.check_asked(late)
        except RuntimeError as error:
            if not in_join:
                raise
            failure = error
        if failure is None and not joined:
            try:
                core.follow_members()
                core.check_gradients(rest)
                core.compare_unreduced(in_join=in_join)
            except (ValueError, RuntimeError) as error:
                failure = error
        if in_join:  # ranks that joined wait for this; if one rank fails all raise
            self._joins.exchange_and_lend(core.group, rest, joined=joined, failure=failure)
        gradients = {param: None if failure is not None else param.grad for param in rest}
        self.step(gradients, failure, Moment.STEP)


class PartTask(Task):
    """A part of an overlapped step: some parameters, and the buckets that were stepped and not gathered."""

    def __init__(
        self,
        overlap: "Overlap",
        gradients: Mapping[Tensor, Tensor | None],  # None leaves a parameter alone
        failure: BaseException | None,  # of this rank so far
        *,
        checks: bool,  # all is here at the end
    ) -> None:
        self._overlap, self._core, self._gradients = overlap, overlap.core, gradients
        self._changed: frozenset[Tensor] = frozenset()
        self._checks = checks
        self.failure = failure

    def step(self, buckets: Sequence[Bucket[Values]]) -> None:
        """Step the parameters that have a gradient and rows here."""
        core = self._core
        try:
            core.engine.under_way.wait_for(core.engine.buckets_of(self._gradients))
            if self.failure is None:
                with self._overlap.stepping, core.group.doing(OVERLAPPED_STEP):
                    core.owned.step(core.groups, None, self._gradients)
        except BaseException as error:  # noqa: BLE001 - raised after the gather, for which others wait
            self.failure = self.failure or error
        self._overlap.note_stepped(self._gradients)
        if core.engine.stamps is not None and self.failure is not None:
            core.engine.stamps.fail(self.failure)

    def to_gather(self, buckets: Sequence[Bucket[Values]]) -> Sequence[Bucket[Values]]:
        """Choose the buckets that were stepped."""
        chosen, self._changed, are_last = self._overlap.take_stepped(buckets)
        if are_last or self._checks:
            self.header = self._core.engine.header()
        return chosen

    def gather(self, bucket: Bucket[Any]) -> Pending[None]:
        """Start the gather of a bucket, on lanes that nobody else uses."""
        return start_gather(self._overlap.lanes.groups, bucket, self.take_header(), changed=self._changed)

    def end(self) -> None:
        """Raise what failed on other ranks, where all has come."""
        if self._checks and self.failure is None:
            self._core.engine.raise_failures()
