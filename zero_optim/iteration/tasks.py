"""Tasks of the engine: ``step()``, and parts of a step during the backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Generic, TypeVar

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.records import OVERLAPPED_STEP
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import Moment, Operation
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.engine import Gathering
from zero_optim.shard.gathers import start_gather
from zero_optim.shard.task import Task
from zero_optim.state.core import Core

T = TypeVar("T")


class StepTask(Gathering, Generic[T]):
    """A call that changes parameters, such as ``step()``: Note [Failures in a step] in `shard.engine`."""

    result: T

    def __init__(
        self, core: Core, name: str, work: Callable[[], T], after_work: Callable[[], None] | None = None
    ) -> None:
        super().__init__(core.engine)
        self._core, self._name = core, name
        self._work, self._after_work = work, after_work  # the latter also after an error
        self._changed: Sequence[Bucket] = ()

    def step(self, buckets: Sequence[Bucket]) -> None:
        """Prepare, change what this rank owns, and let the gathers tell how it went."""
        core, engine = self._core, self._core.engine
        try:
            try:
                core.prepare()
                core.check_gradients()
                self.result = self._work()
            finally:
                if self._after_work is not None:
                    self._after_work()
        except BaseException as error:  # noqa: BLE001 - raised after the gather, for which others wait
            self.failure = error
        call = core.call(self._name, self.failure)
        active = engine.begin_step(core.groups, call)
        is_all = all(active) or core.owned.local.moves_frozen
        self._changed = engine.buckets if is_all else list(compress(engine.buckets, active))
        for bucket in buckets:
            bucket.stepped(changed=is_all or bucket in self._changed)
        if self.failure is not None and not any(
            Operation.GATHER in bucket.schedule[Moment.STEP] for bucket in self._changed
        ):
            core.ranks.works.note_failure(call.failure_text)
        self._tells = True

    def to_gather(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Leave out buckets that never trained; one must start to train on all ranks."""
        changed = self._changed
        return super().to_gather(buckets if changed == buckets else [b for b in buckets if b in changed])

    def end(self) -> None:
        """Raise what other ranks have failed with, or if options differ."""
        core, engine = self._core, self._core.engine
        call = core.call(self._name, self.failure)
        engine.compare_calls(core.ranks, call, with_last=not engine.is_lazy)


class PartTask(Task):
    """A part of an overlapped step: some parameters, and the buckets that were stepped and not gathered.

    ``ungathered`` outlives the task: a row may have its gathers at a later moment.
    """

    def __init__(
        self,
        core: Core,
        lanes: Sequence[RankGroup],
        gradients: Mapping[Tensor, Tensor | None],  # None leaves a parameter alone
        ungathered: dict[Tensor, None],
        failure: BaseException | None = None,  # of this rank so far
        *,
        checks: bool = False,  # all is here at the end
    ) -> None:
        self._core, self._lanes, self._gradients = core, lanes, gradients
        self._ungathered, self._checks = ungathered, checks
        self._changed: frozenset[Tensor] = frozenset()
        self._tells = checks  # the next gather has a header
        self.failure = failure

    def step(self, buckets: Sequence[Bucket]) -> None:
        """Step the parameters that have a gradient and rows here."""
        core = self._core
        try:
            core.engine.under_way.wait_for(core.engine.buckets_of(self._gradients))
            if self.failure is None:
                with core.group.doing(OVERLAPPED_STEP):
                    core.owned.step(core.groups, None, self._gradients)
        except BaseException as error:  # noqa: BLE001 - raised after the gather, for which others wait
            self.failure = self.failure or error
        self._ungathered.update(dict.fromkeys(self._gradients))
        if core.engine.stamps is not None and self.failure is not None:
            core.engine.stamps.fail(self.failure)

    def to_gather(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Choose the buckets that were stepped."""
        self._changed = frozenset(self._ungathered)  # the pass still reads frozen ones
        self._ungathered.clear()
        stepped = self._core.engine.buckets_of(self._changed)
        return [bucket for bucket in stepped if bucket in buckets]

    def gather(self, bucket: Bucket) -> Pending[None]:
        """Start the gather of a bucket, on lanes that nobody else uses."""
        header, self._tells = self._core.engine.header() if self._tells else None, False
        return start_gather(self._lanes, bucket, header, changed=self._changed)

    def end(self) -> None:
        """Raise what failed on other ranks, where all has come."""
        if self._checks and self.failure is None:
            self._core.engine.raise_failures()


@contextmanager
def finally_call(end: Callable[[BaseException | None], object]) -> Iterator[None]:
    """Call ``end`` with the body's error or None: the other ranks wait for it."""
    try:
        yield
    except BaseException as error:
        end(error)
        raise
    end(None)
