"""The engine's task of ``step()``."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Generic, TypeVar

from zero_optim.dtensor.held_values import HeldValues, check_heads, head_of
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.health.stamps import Call
from zero_optim.shard.bucket import Bucket, Values
from zero_optim.shard.task import Task
from zero_optim.state.core import Core
from zero_optim.step.owned import Gradients

T = TypeVar("T")
_AT_ONCE = 2  # buckets that move to owners, or back


class StepTask(Task, Generic[T]):
    """A call that changes parameters, such as ``step()``: Note [Failures in a step] in `shard.engine`."""

    result: T
    _call: Call  # as the stamps tell it

    def __init__(
        self,
        core: Core,
        name: str,
        work: Callable[[], T],
        after_work: Callable[[], None] | None = None,
        work_on: Callable[[Gradients], T] | None = None,  # some parameters alone
    ) -> None:
        self._core, self._name, self.span = core, name, core.engine.span
        self._work, self._after_work = work, after_work  # the latter also after an error
        self._changed: Sequence[Bucket[Values]] = ()
        self._is_prepared = False
        self._work_on = work_on
        self._is_in_parts = work_on is not None and core.owned.local.can_step_parts
        self._held = core.held_buckets
        self._moved: list[Bucket[HeldValues]] = []  # whose rows go to owners and back
        self._head = b""

    def _prepare(self) -> None:
        """Check and take over what the user changed, once."""
        if self._is_prepared:
            return
        self._is_prepared = True
        try:
            self._core.prepare()
            self._core.check_gradients()
            for bucket in self._held:
                bucket.values.open()
        except BaseException as error:  # noqa: BLE001 - raised when the others have heard of it
            self.failure = error
        if self._held:
            self._head = head_of(self._held, self.failure)
            self._changed = self._changing(self._core.engine.agree_on_active(self._core.groups))

    def _changing(self, active: Sequence[bool]) -> Sequence[Bucket[Values]]:
        buckets = self._core.engine.buckets
        is_all = all(active) or self._core.owned.local.moves_frozen
        return buckets if is_all else list(compress(buckets, active))

    def reduce(self, bucket: Bucket[HeldValues]) -> None:
        """Start to bring what FSDP2 has reduced to owners, but not of buckets that never trained."""
        self._prepare()
        if bucket not in self._changed:
            return
        self._moved.append(bucket)
        if not self._is_in_parts or len(self._moved) <= _AT_ONCE:
            bucket.values.start_to_owners(self._head)

    def step(self, buckets: Sequence[Bucket[Values]]) -> None:
        """Prepare, change what this rank owns, and let the gathers tell how it went."""
        core = self._core
        self._prepare()
        if self._moved:  # the head of each message tells all
            heads = self._moved[0].values.take_arrived()
            try:
                check_heads(core.group, self._held, heads, self.failure)
            except BaseException:
                for bucket in self._moved:
                    if bucket.values.is_coming:  # on every rank
                        bucket.values.take_arrived()
                raise
        if self._is_in_parts and len(self._moved) > 1:
            self._step_in_parts()
            return
        for bucket in self._moved[1:]:
            bucket.values.take_arrived()
        try:
            try:
                if self.failure is None:
                    self.result = self._work()
            finally:
                if self._after_work is not None:
                    self._after_work()
        except BaseException as error:  # noqa: BLE001 - raised after the gather, for which others wait
            self.failure = error
        self._tell()

    def _step_in_parts(self) -> None:
        """Step a bucket while the next one moves; all ranks start moves in one order, also after errors."""
        core = self._core
        moving = {param for bucket in self._moved for param in bucket.params}
        grads = {param: core.owned.leaves.own_gradient(param) for param in core.own_params()}
        rest = {param: grad for param, grad in grads.items() if param not in moving}
        for number, bucket in enumerate(self._moved):
            if bucket.values.is_coming:
                bucket.values.take_arrived()
            try:
                if self.failure is None:
                    assert self._work_on is not None
                    self.result = self._work_on({**bucket.values.gradients(), **rest})
            except BaseException as error:  # noqa: BLE001 - raised after the gather, for which others wait
                self.failure = error
            rest = {}
            if bucket is self._moved[-1]:
                self._tell()
            self.start_awaited(bucket, _AT_ONCE)
            for later in self._moved[number + _AT_ONCE :][:1]:
                later.values.start_to_owners(self._head)

    def _tell(self) -> None:
        """Begin the stamps of this call, which the gathers of what changed send."""
        core, engine = self._core, self._core.engine
        self._call = call = core.call(self._name, self.failure)
        self._changed = self._changing(engine.agree_on_active(core.groups))
        self.header = engine.begin_call(core.groups, call)
        for bucket in core.sharding.row_buckets:
            bucket.values.stepped(changed=self._changed is engine.buckets or bucket in self._changed)
        if self.failure is not None and not any(
            Operation.GATHER in bucket.schedule[Moment.STEP] for bucket in self._changed
        ):
            core.ranks.works.note_failure(call.failure_text)

    def to_gather(self, buckets: Sequence[Bucket[Values]]) -> Sequence[Bucket[Values]]:
        """Leave out buckets that never trained; one must start to train on all ranks."""
        changed = self._changed
        if held := set(self._held):
            moved = [] if self.awaited else self._moved  # else they are on their way
            return [b for b in buckets if b in (moved if b in held else changed)]
        return buckets if changed == buckets else [b for b in buckets if b in changed]

    def gather(self, bucket: Bucket[Any]) -> Pending[None]:
        """Start the gather of a bucket, or send rows back to those who keep them."""
        for moved in self._moved:
            if moved is bucket:
                return moved.values.start_to_holders(self.take_header())
        return self._core.engine.gathers.start(bucket, self.take_header())

    def clean_up(self, error: BaseException, buckets: Sequence[Bucket[Values]]) -> None:
        """Drop what came to owners."""
        for bucket in self._held:
            bucket.values.release()

    def end(self) -> None:
        """Raise what other ranks have failed with, or if options differ."""
        for bucket in self._held:
            bucket.values.release()
        self._core.engine.compare_calls(self._core.ranks, self._call, with_last=True)
