"""The engine: it owns an optimizer's buckets, and runs for each the row of the table that was chosen for it.

In an iteration `Engine.on` alone starts the five operations: `_reduce`, `_step`, `_gather`, `_wait` and
`_free`. Beside it a row that changed frees its unit, a backward pass that breaks off frees its gradients, and
building or moving a model gathers by itself. PyTorch's DDP reduces its buckets itself. A step of DTensors
in parts moves each part to its owners and back within `_step` (`iteration.tasks`). All ranks make the same
calls, in the same order of buckets. Who makes them:

==============================  ==========================================================================
moment                          source
==============================  ==========================================================================
a module's forward pass         its hooks: `zero_optim.shard.lazy`, and `ddp.full.in_use` for units
a module's backward pass        hooks of gradients: `ddp.full.in_backward`
a bucket has all gradients      a gradient's hook, by `ddp.reducer.backward_pass`
a bucket is reduced             `iteration.overlap`, for the comm hook `zero_step`
after the backward pass         `iteration.overlap`, and `ddp.full.in_backward`
``step()``                      `iteration.iteration`, and `iteration.overlap` for what is left to step
==============================  ==========================================================================

Note [Failures in a step]
    A rank whose step raises gathers all the same, its row as the step left it, and its stamp tells the
    others, which have stepped. It raises its own error at the end of `Engine.on`. On the CPU the others raise
    as the gathers end, with that rank's number and message: a `RemoteRankError`, or an error of the same
    class if that is a usual one. On an accelerator, or with lazy gathers, they raise in a later call. At
    ZeRO-3, where a step gathers nothing, see Note [Stamps of units] in `zero_optim.health.unit_stamps`; where
    FSDP2 keeps rows that are stepped in place, the watchdog tells.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.autograd import eager
from zero_optim.compat.streams import is_asynchronous
from zero_optim.errors import RemoteRankError
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import ZERO1, Moment, Operation, Placement, Schedule
from zero_optim.health.stamp import Header
from zero_optim.health.stamps import Call, Stamps
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.shard.bucket import Bucket, Values
from zero_optim.shard.gathers import BucketGathers
from zero_optim.shard.task import Task
from zero_optim.shard.whole_values import copy_out

NUM_FLAT_TENSORS = 4  # of gathers that a call waits for, at most


class Gathering(Task):
    """The gather of all buckets, without a header."""

    def __init__(self, engine: "Engine", free_units: Callable[[], None]) -> None:
        self._gathers, self.span, self._free_units = engine.gathers, engine.span, free_units

    def step(self, buckets: Sequence[Bucket[Values]]) -> None:
        """Free units, as all rows may have changed."""
        self._free_units()

    def gather(self, bucket: Bucket[Any]) -> Pending[None]:
        """Start the gather of a bucket."""
        return self._gathers.start(bucket, None)


class Engine:
    """Owns buckets, and runs their rows. All ranks of its group call `on`, and what else communicates."""

    group: RankGroup
    gathers: BucketGathers

    def __init__(self) -> None:
        self.buckets: list[Bucket[Values]] = []
        self.is_on_cpu = True
        self.under_way = Flow()  # gathers that a later moment waits for, by bucket
        self.stamps: Stamps | None = None  # none in a group of one
        self._replicas: Callable[[BaseException], None] | None = None  # of a mesh
        self._recipe = ZERO1  # of buckets that every rank keeps whole
        self._readers: list[frozenset[Tensor]] = []  # parameters of models whose modules wait for gathers
        self._numbers: dict[Tensor, int] = {}  # of the bucket of each parameter
        self._active: list[bool] = []

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without models and replicas, which have the original."""
        return {**vars(self), "_recipe": ZERO1, "_replicas": None, "_readers": []}

    # ------------------------------------------------------------------ process groups that come and go

    def bind(self, group: RankGroup, own_options: Collection[str]) -> None:
        """Begin in a group, without buckets; models go on waiting for gathers. No communication."""
        self.group = group
        self.stamps = None if group.size == 1 else Stamps(own_options)
        group.works.note_failure("")  # of an optimizer before this one
        self.buckets, self._numbers, self._active = [], {}, []
        self.gathers = BucketGathers(group, self.buckets)

    def release(self, *, waits: bool) -> None:
        """Wait for gathers or abandon them, then release the groups; no error if a rank died."""
        try:
            if waits:
                self.under_way.wait()
        except RuntimeError:  # of the backend
            self.gathers.abandon()
        finally:
            self.under_way.abandon()
        self.group, self._replicas, self._recipe = self.group.release(), None, ZERO1
        self.gathers = BucketGathers(self.group, self.buckets)
        self._choose()

    def join_replicas(self, tell: Callable[[BaseException], None]) -> None:
        """Send errors of failed steps to the other replicas of a mesh; ``tell`` holds no optimizer."""
        self._replicas = tell

    def report_to_replicas(self, error: BaseException) -> None:
        """Send an exception that all ranks here raise to the other replicas."""
        if self._replicas is not None:
            self._replicas(error)

    # ------------------------------------------------------------------ buckets, and their rows of the table

    def add(self, buckets: Sequence[Bucket[Values]]) -> None:
        """Take more buckets."""
        for number, bucket in enumerate(buckets, len(self.buckets)):
            self._numbers.update(dict.fromkeys(bucket.params, number))
        self.buckets += buckets
        self.is_on_cpu = not any(is_asynchronous(bucket.device) for bucket in self.buckets)
        self._active += (bucket.is_active for bucket in buckets)
        self._choose()

    def run_by(self, recipe: Schedule) -> None:
        """Run buckets that are whole everywhere by a recipe; gradients that go to owners do so on. Local."""
        self._recipe = recipe.to_owners() if self._recipe.gradients is Placement.ROW else recipe
        self._choose()

    def reduce_to_owners(self) -> None:
        """Have gradients reduced to their owners alone, from now on. No communication."""
        self._recipe = self._recipe.to_owners()
        self._choose()

    def read_by(self, params: frozenset[Tensor], *, lazily: bool) -> None:
        """Have a model's modules wait for gathers of its parameters, or no more. No communication."""
        (self._readers.append if lazily else self._readers.remove)(params)
        self._choose()

    def _choose(self) -> None:
        read, lazy = frozenset[Tensor]().union(*self._readers), self._recipe.lazily()
        for bucket in self.buckets:
            if bucket.schedule.parameters is Placement.WHOLE:  # others have a recipe of their own
                bucket.run_by(lazy if read.issuperset(bucket.params) else self._recipe)

    @property
    def span(self) -> AbstractContextManager[object]:
        """What measures gathers, and waits for them: those of the CPU."""
        return self.gathers.group.phase if self.is_on_cpu else nullcontext()

    def numbers_of(self, params: Iterable[Tensor]) -> list[int | None]:
        """Return the numbers of parameters' buckets, None for those in none."""
        return [self._numbers.get(param) for param in params]

    def known_of(self, params: Iterable[Tensor]) -> list[Tensor]:
        """List the parameters that are in a bucket."""
        return [param for param in params if param in self._numbers]

    def buckets_of(self, params: Iterable[Tensor]) -> list[Bucket[Values]]:
        """List the buckets of some parameters, in the order of gathers; those in none are left out."""
        numbers = {self._numbers[param] for param in self.known_of(params)}
        return [self.buckets[number] for number in sorted(numbers)]

    def active(self) -> list[bool]:
        """Return for each bucket whether it trains, or did at an earlier gather."""
        return [was or bucket.is_active for bucket, was in zip(self.buckets, self._active, strict=True)]

    @eager
    def refresh(self) -> None:
        """Wait for gathers, then take over the user's changes: Note [Moving parameters] in `whole_values`."""
        self.under_way.wait()
        self.take_over()

    def take_over(self) -> None:
        """Take over the user's changes; RuntimeError, after all others, if a parameter no longer fits."""
        failure: Exception | None = None
        written = list[tuple[int, int]]()
        for bucket in self.buckets:
            written += bucket.values.written()
        for bucket in self.buckets if written else ():
            copy_out(bucket.params, written)
        for bucket in self.buckets:  # all of them, then it raises
            try:
                if written or not bucket.values.is_in_place:
                    bucket.values.refresh()
            except RuntimeError as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # the error has this frame

    # ------------------------------------------------------------------ the five operations

    def on(
        self,
        moment: Moment,
        buckets: Sequence[Any],  # of parameters or of gradients
        task: Task,
        only: Operation | None = None,  # to gather ahead of the moment
    ) -> None:
        """Run what the rows of buckets have for a moment; at last raises what failed on this rank."""
        rows = list(map(_ROW, buckets))
        are_equal = not rows or rows.count(rows[0]) == len(rows)  # as nearly always
        try:
            for operation in rows[0].get(moment, ()) if rows and are_equal else _RUN:
                chosen = buckets
                if not are_equal:
                    pairs = zip(buckets, rows, strict=True)
                    chosen = [each for each, row in pairs if operation in row.get(moment, ())]
                if chosen and only in (None, operation):
                    try:
                        _RUN[operation](self, moment, chosen, task)
                    except BaseException as error:
                        task.clean_up(error, chosen)
                        if self.buckets:  # else it gathers nothing
                            self.gathers.abandon()
                        raise
            task.end()
            if task.failure is not None:
                raise task.failure
        except BaseException as error:
            if task.failure is not None and error is not task.failure:
                error.__context__ = task.failure
            raise
        finally:
            task.failure = None  # whose frames have the task

    def _reduce(self, _: Moment, buckets: Sequence[Any], task: Task) -> None:
        for bucket in buckets:
            task.reduce(bucket)

    def _step(self, _: Moment, buckets: Sequence[Bucket[Values]], task: Task) -> None:
        task.step(buckets)

    @eager
    def _gather(self, moment: Moment, buckets: Sequence[Bucket[Values]], task: Task) -> None:
        """Start gathers; of those that this moment waits for, the task limits how many at once."""
        with task.span:
            for bucket in task.to_gather(buckets):
                if Operation.WAIT in bucket.schedule.moments[moment]:
                    task.start_awaited(bucket, NUM_FLAT_TENSORS)
                else:
                    self.under_way.start(partial(task.gather, bucket), keys=(bucket,))

    @eager
    def _wait(self, _: Moment, buckets: Sequence[Bucket[Values]], task: Task) -> None:
        with task.span:
            while task.awaited:
                task.awaited.popleft().wait()
            if self.under_way:
                self.under_way.wait_for(buckets)
            task.arrived(buckets)

    def _free(self, _: Moment, buckets: Sequence[Any], __: Task) -> None:
        for bucket in buckets:
            bucket.free()

    def gather_all(self, free_units: Callable[[], None]) -> None:
        """Gather all parameters outside units, frozen ones too, and wait; all ranks call."""
        every = [bucket for bucket in self.buckets if bucket.schedule.parameters is not Placement.HELD]
        self.on(Moment.STEP, every, Gathering(self, free_units))
        self.under_way.wait()

    # ------------------------------------------------------------------ what ranks tell each other beside

    @eager
    def begin_call(self, groups: Sequence[ParamGroup], call: Call) -> Header | None:
        """Begin a call's stamps, and return its `header`; the last call's have been waited for."""
        return None if self.stamps is None else self.stamps.begin(groups, call)

    def header(self) -> Header | None:
        """Return what tells the other ranks of the last call; it goes with one gather."""
        return None if self.stamps is None else self.stamps.header()

    @eager
    def agree_on_active(self, groups: Sequence[ParamGroup]) -> list[bool]:
        """Return `active`; communicates if it changed. RankMismatchError, on every rank, if it differs."""
        if all(self._active):
            return self._active
        active = self.active()
        if active != self._active:
            states = ["trainable" if param.requires_grad else "frozen" for param in params_of(groups)]
            items = [f"{name} {state}" for name, state in zip(param_names(groups), states, strict=True)]
            agree(self.group, items, "which parameters are frozen")
            self._active = active
        return active

    @eager
    def compare_calls(self, group: RankGroup, call: Call, *, with_last: bool) -> None:
        """Check stamps; ``with_last`` also the last call's, if they have come and the CPU need not wait."""
        if self.stamps is not None:
            has_come = self.is_on_cpu and not self._readers
            self.stamps.compare(group, call, with_last=with_last and has_come)

    def raise_failures(self) -> None:
        """Raise, once, if a rank is known to have failed in the last call."""
        try:
            if self.stamps is not None:
                self.stamps.raise_failures(self.group)
        except RemoteRankError as error:
            self.report_to_replicas(error)
            raise


_ROW = attrgetter("schedule.moments")
_RUN = {operation: getattr(Engine, f"_{operation.value}") for operation in Operation}
