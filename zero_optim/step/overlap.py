"""The overlapped step: buckets are stepped while the backward pass still runs.

Note [Overlap is no mode]
    A comm hook steps a bucket once its gradients are reduced and starts its gather; ``step()`` steps the
    rest. The optimizer's owners and buckets never change, so DDP may rebuild its buckets at any time.

Note [Phases of an overlapped step]
    The first bucket of a backward pass creates an `OverlappedStep` in ``Phase.BACKWARD``. The end of the pass
    moves it to ``Phase.WAITING``, until ``step()`` or the next pass. If the next pass finds it in
    ``Phase.BACKWARD``, the last one broke off.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from torch import Tensor

from zero_optim.comm.collectives import LET_GO, RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside, may_run_beside
from zero_optim.comm.records import OVERLAPPED_STEP
from zero_optim.errors import RemoteRankError
from zero_optim.plan.groups import ParamGroup, params_of
from zero_optim.plan.pieces import Pieces
from zero_optim.shard.gathers import start_gather
from zero_optim.shard.sharding import Sharding
from zero_optim.step.owned import OwnedState


class Phase(Enum):
    """The phase of an overlapped step."""

    BACKWARD = "the backward pass runs, and buckets are stepped"
    WAITING = "the backward pass has ended, and step() has not been called"


@dataclass(slots=True, eq=False)
class OverlappedStep:
    """One step that is taken during a backward pass. See Note [Phases of an overlapped step].

    ``num_passes``: since ``step()``, this one included. ``lends``: ``step()`` lends joined ranks gradients.
    ``stepped``: parameters stepped by any owner. ``seen``: parameter, identity and version of each gradient
    at the end of the pass. ``told``: the previous step's error, to be raised then.
    """

    num_passes: int
    lends: bool
    phase: Phase = Phase.BACKWARD
    has_failed: bool = False
    stepped: dict[Tensor, None] = field(default_factory=dict)
    seen: list[tuple[Tensor, int, int]] = field(default_factory=list)
    told: Exception | None = None

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """Record the end of the backward pass; if ``is_final``, ``step()`` refuses later changes."""
        self.phase = Phase.WAITING
        self.num_passes -= failed
        self.has_failed |= failed
        if is_final:
            self.seen = [(p, id(p.grad), p.grad._version) for p in self.stepped if p.grad is not None]

    def check_asked(self, late: str) -> None:
        """Raise for a call (``late``) that came too late, for several passes, or for changed gradients."""
        if late:
            raise RuntimeError(
                f"the step was taken during the backward pass, too early for {late}: leave it out, or "
                "leave out zero_step (overlap_with_ddp). bfloat16 needs no GradScaler"
            )
        self.check_passes()
        self.check_gradients()

    def fail(self) -> None:
        """Record that the backward pass raises, since another rank failed."""
        self.num_passes -= not self.has_failed
        self.has_failed = True

    def check_passes(self) -> None:
        """Raise RuntimeError for a second backward pass before ``step()``."""
        if self.num_passes > 1:
            raise RuntimeError(
                f"{self.num_passes} backward passes were reduced before step(), and each was stepped with "
                "the gradients added up so far. Put all but the last backward pass of a step under no_sync()"
            )

    def check_gradients(self) -> None:
        """Raise RuntimeError if used gradients changed or some are gone; all gone means ``zero_grad()``."""
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

    def rest(self, groups: Sequence[ParamGroup]) -> list[Tensor]:
        """Return what ``step()`` must still step: what trains or has a gradient; equal on every rank."""
        left = [param for param in params_of(groups) if param not in self.stepped]
        return [param for param in left if param.requires_grad or param.grad is not None]


class Overlap:
    """Steps a sharded optimizer bucket by bucket, and starts the gather of each bucket.

    All ranks construct it, which takes process groups (``lanes``), and call its methods in one order with
    equal parameters, one thread at a time. ``takes_thread``: another thread may step; see Note [A thread or
    none] in `zero_optim.hooks.overlap.line`. ``current``: the unfinished step.
    """

    def __init__(self, group: RankGroup, sharding: Sharding, owned: OwnedState) -> None:
        self.group = group
        self.takes_thread = may_run_beside(group, sharding.pieces)
        self.lanes = self.new_lanes()
        self.current: OverlappedStep | None = None
        self._sharding = sharding
        self._owned = owned
        self._announced: dict[Callable[[], object], None] = {}
        self._loop_calls_step = False

    def let_go(self, groups: Sequence[ParamGroup], *, waits: bool) -> bool:
        """Release the process groups; return whether some, but not all, parameters were stepped.

        With ``waits`` it first waits for steps on another thread or stream, and ignores their failures.
        """
        is_left = bool(self._announced)
        try:
            if waits:
                self.wait_for_steps()
                is_left = False
        except RuntimeError:  # of the backend
            self.lanes.abandon()
        current, self.current, self._announced = self.current, None, {}
        self.group = self.group.let_go()
        self.lanes = Lease.of(self.group)
        if current is None:
            return is_left
        return is_left or current.has_failed or current.phase is Phase.BACKWARD or bool(current.rest(groups))

    def check_attached(self) -> None:
        """Raise RuntimeError if the process groups were released."""
        if self.group.is_let_go:
            raise RuntimeError(LET_GO)

    def begin(self, *, joined: bool, lends: bool) -> None:
        """Begin a step; ``joined``: this rank has no inputs left.

        Raises RuntimeError if the last backward pass broke off, or if a loop that called ``step()`` no longer
        does.
        """
        last = self.current
        broke_off = last is not None and last.phase is Phase.BACKWARD
        self.current = OverlappedStep((last.num_passes if last else 0) + (not broke_off), lends)
        if self._loop_calls_step:
            self.current.check_passes()
        under_way = self._sharding.under_way
        if broke_off and under_way.is_unclaimed and not joined:
            raise RuntimeError(
                "the last backward pass broke off after part of its step had been taken, and the "
                "forward pass since may have read parameters half way: call optimizer.wait_for_gathers() "
                "before going on"
            )
        under_way.wait()

    def take_over(self) -> None:
        """Apply the user's changes of parameters; see `Sharding.take_over`."""
        self._sharding.take_over()

    def announce(self, wait: Callable[[], object]) -> None:
        """Record a bucket that is stepped on another thread or stream, and the call that waits for it."""
        self._announced[wait] = None

    def wait_for_steps(self) -> None:
        """Wait for all announced steps; the current stream waits for other streams."""
        announced, self._announced = self._announced, {}
        # Without a thread these calls do the work themselves, and the waits in it are counted there.
        exposed = bool(announced) and self.takes_thread
        with self.group.during("reduce", is_exposed=exposed).phase.held_up():
            for wait in announced:
                wait()

    def new_lanes(self) -> Lease:
        """Take process groups for a thread, or ``group`` without one. All ranks call."""
        group = self.group.during("gather")
        return lanes_beside(group) if self.takes_thread else Lease.of(group)

    def reducing(self) -> RankGroup:
        """Return the ranks for a gradient reduction; its waits count as exposed only without a thread."""
        return self.group.during("reduce", is_exposed=not self.takes_thread)

    def pieces(self, params: Sequence[Tensor]) -> list[Pieces]:
        """Return who owns which rows of some parameters; raises for a parameter the optimizer lacks."""
        unknown = sum(param not in self._sharding.pieces for param in params)
        if unknown:
            raise ValueError(
                f"{unknown} parameters of the model are not in the optimizer, so they have no owner to "
                'reduce their gradients to: add them to it, or reduce gradients "everywhere"'
            )
        return [self._sharding.pieces[param] for param in params]

    def drop_gradients(self) -> None:
        """Drop gradients whose rows other ranks own: they are not reduced here."""
        assert self.current is not None  # called at the end of its backward pass
        for param in self.current.stepped:
            if self._sharding.piece_here(param) is None or self._sharding.is_cut(param):
                param.grad = None

    def bucket_of(self, param: Tensor) -> int | None:
        """Return the number of a parameter's bucket; None without one."""
        return self._sharding.number_of(param)

    def num_params(self, number: int) -> int:
        """Return how many parameters a bucket has."""
        return len(self._sharding.buckets[number].params)

    def step(
        self,
        groups: list[ParamGroup],
        gradients: Mapping[Tensor, Tensor | None],
        failure: BaseException | None = None,
    ) -> None:
        """Step some parameters, and start the gathers of their buckets; all ranks call.

        ``gradients``: parameter -> reduced gradient, or None to leave it alone. ``failure``: an error of this
        rank so far, which the other ranks are told.
        """
        owned = {
            param: gradient
            for param, gradient in gradients.items()
            if gradient is not None and self._sharding.piece_here(param) is not None
        }
        buckets = self._sharding.buckets_of(gradients)
        # Gathers of the pass may be under way.
        if self.current is not None and self.current.phase is Phase.WAITING:
            self._sharding.under_way.wait_for(param for bucket in buckets for param in bucket.params)
        try:
            if owned:
                with self.group.doing(OVERLAPPED_STEP):
                    self._owned.step_some(groups, owned)
            if failure is None:  # of all, as an ordinary step does, also of those without a gradient
                self._owned.average.update(gradients)
        except BaseException as error:
            failure = failure or error
            raise
        finally:  # the others wait for it, even if the class's own step fails
            if self.current is not None:
                self.current.stepped.update(dict.fromkeys(gradients))
            gathers = self._sharding.gathers
            if gathers.stamps is not None and failure is not None:
                gathers.stamps.fail(failure)
            for bucket in buckets:
                begin = partial(start_gather, self.lanes.groups, bucket, gathers.stamps)
                gathers.under_way.start(begin, keys=bucket.params)

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """End a backward pass: wait for the gathers that no forward pass waits for."""
        assert self.current is not None  # begun by the first bucket of the pass
        self.current.end_backward(is_final=is_final, failed=failed)
        told, self.current.told = self.current.told, None
        try:
            self._sharding.end_step()
        except RemoteRankError:
            self.current.fail()  # as on the rank that failed
            raise
        if told is not None and not failed:
            self.current.fail()
            raise told

    @contextmanager
    def finishing(self) -> Iterator[OverlappedStep]:
        """Finish the current step in ``step()``; the body steps the rest; all ranks enter."""
        current = self.current
        assert current is not None  # asked for by the caller
        try:
            yield current
        finally:
            self._loop_calls_step = True
            self.current = None
        self._sharding.end_step()
