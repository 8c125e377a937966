"""The overlapped step: a step that is taken while the backward pass still runs, some parameters at a time.

Note [Overlap is no mode]
    Whoever has a bucket's reduced gradients, a comm hook as a rule, steps that bucket and starts its gather
    while others are computed; ``step()`` finishes what has not been stepped. Owners never change, so it does
    not matter how often DDP makes its buckets anew, and the first step is as good as any.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from zero_optim.comm.collectives import LET_GO, RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside, may_run_beside
from zero_optim.comm.records import OVERLAPPED_STEP
from zero_optim.errors import RemoteRankError
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.layout import Span
from zero_optim.plan.pieces import Pieces
from zero_optim.shard.gathers import start_gather_of_part
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.storage import ParamBucket
from zero_optim.step.overlapped_step import OverlappedStep, Phase
from zero_optim.step.owned import OwnedState


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """Parameters that are stepped together.

    Attributes:
        num_known: how many parameters the optimizer had.
        given: the parameters as they were given.
        params: those of them that the optimizer has, whoever owns them.
        owned: those of which this rank owns a piece, each with its place among the parameters given.
        gathers: for each bucket concerned, the bucket, the parameters by index within it, and where they lie.
    """

    num_known: int
    given: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    owned: tuple[tuple[int, Tensor], ...]
    gathers: tuple[tuple[ParamBucket, frozenset[int], tuple[Span, ...]], ...]


class Overlap:
    """Steps a sharded optimizer part by part, and starts the gather of each part.

    All ranks construct it, and call its methods in the same order with the same parameters. One thread at a
    time. Construction communicates where a thread is to step: that takes process groups for its gathers.

    Args:
        group: the ranks.
        sharding: who owns what.
        owned: what steps the parameters that this rank owns.

    Attributes:
        group: the ranks.
        takes_thread: parts may be stepped on another thread than the caller's; the same on every rank. Note
            [A thread or none] in `zero_optim.hooks.overlap.line` says when.
        lanes: process groups for gathers: of a thread's own, or ``group``.
        current: the step that was begun and not finished; None between steps.
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
        """Let the process groups go; this object is of no use any more. Does not communicate.

        Args:
            groups: the public groups.
            waits: wait for parts that are stepped on another thread or stream; what fails there is given up.

        Returns:
            Whether a step was taken half: some parameters were stepped, others were not.
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
        """Refuse to go on once the process groups were let go.

        Raises:
            RuntimeError: they were.
        """
        if self.group.is_let_go:
            raise RuntimeError(LET_GO)

    def begin(self, *, joined: bool, lends: bool) -> None:
        """Begin a step; its first part comes next.

        Args:
            joined: this rank ran out of inputs.
            lends: see `OverlappedStep`.

        Raises:
            RuntimeError: the last one has not been finished by ``step()``, though the ones before were; or
                its backward pass broke off.
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
        """Take over what the user did to parameters, see `Sharding.take_over`."""
        self._sharding.take_over()

    def announce(self, wait: Callable[[], object]) -> None:
        """Take note of a part that is stepped on another thread or stream, and of what sees to its end."""
        self._announced[wait] = None

    def wait_for_steps(self) -> None:
        """Wait until all parts announced were stepped and their gathers started.

        What is stepped on another stream is waited for by the current one.
        """
        announced, self._announced = self._announced, {}
        # Without a thread these calls do the work themselves, and the waits in it are counted there.
        exposed = bool(announced) and self.takes_thread
        with self.group.during("reduce", is_exposed=exposed).phase.held_up():
            for wait in announced:
                wait()

    def new_lanes(self) -> Lease:
        """Take process groups that a thread need not share; without a thread ``group``. All ranks call."""
        group = self.group.during("gather")
        return lanes_beside(group) if self.takes_thread else Lease.of(group)

    def reducing(self) -> RankGroup:
        """Give the ranks for a reduction of gradients: waits for it are not exposed where a thread waits."""
        return self.group.during("reduce", is_exposed=not self.takes_thread)

    def pieces(self, params: Sequence[Tensor]) -> list[Pieces]:
        """Tell who owns which rows of some parameters.

        Raises:
            ValueError: the optimizer does not have one of them.
        """
        unknown = sum(param not in self._sharding.pieces for param in params)
        if unknown:
            raise ValueError(
                f"{unknown} parameters of the model are not in the optimizer, so they have no owner to "
                'reduce their gradients to: add them to it, or reduce gradients "everywhere"'
            )
        return [self._sharding.pieces[param] for param in params]

    def drop_gradients(self) -> None:
        """Let go of the gradients of what other ranks own, all or some rows: here they were not reduced."""
        assert self.current is not None  # called at the end of its backward pass
        for param in self.current.stepped:
            if self._sharding.piece_here(param) is None or self._sharding.is_cut(param):
                param.grad = None

    def part(self, params: Sequence[Tensor]) -> StepPart:
        """Plan the step of some parameters; those that the optimizer does not have are left out."""
        known = [(place, param) for place, param in enumerate(params) if param in self._sharding.pieces]
        owned = [(place, param) for place, param in known if self._sharding.piece_here(param) is not None]
        every = tuple(param for _, param in known)
        num_known = len(self._sharding.pieces)
        return StepPart(num_known, tuple(params), every, tuple(owned), self._sharding.spans_of(every))

    def is_current(self, part: StepPart, params: Sequence[Tensor]) -> bool:
        """Whether `part` would give the same for some parameters."""
        return (
            part.num_known == len(self._sharding.pieces)
            and len(part.given) == len(params)
            and all(a is b for a, b in zip(part.given, params, strict=True))
        )

    def step(
        self,
        groups: list[ParamGroup],
        part: StepPart,
        gradients: Sequence[Tensor | None],
        failure: BaseException | None = None,
    ) -> None:
        """Step a part, and start its gather; all ranks call.

        Args:
            groups: the public groups, for their options.
            part: of the parameters.
            gradients: for each parameter that `part` was given, reduced; None leaves it alone.
            failure: why the step has failed here already, if it has; the other ranks are told.
        """
        owned = {}
        for place, param in part.owned:
            gradient = gradients[place]
            if gradient is not None:
                owned[param] = gradient
        try:
            if owned:
                with self.group.doing(OVERLAPPED_STEP):
                    self._owned.step_some(groups, owned)
        except BaseException as error:
            failure = failure or error
            raise
        finally:  # the others wait for it, even if the class's own step fails
            if self.current is not None:
                self.current.stepped.update(dict.fromkeys(part.params))
            stamps = self._sharding.gathers.stamps
            if stamps is not None and failure is not None:
                stamps.fail(failure)
            for bucket, chosen, spans in part.gathers:
                pending = start_gather_of_part(self.lanes.groups, bucket, chosen, spans, stamps)
                self._sharding.under_way.add([bucket.params[index] for index in chosen], pending)

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """End a backward pass: wait for the gathers, but for those that a forward pass will wait for.

        Args:
            is_final: see `OverlappedStep.end_backward`.
            failed: likewise.
        """
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
        """Finish the current step, in ``step()``: the body steps the rest; all ranks enter."""
        current = self.current
        assert current is not None  # asked for by the caller
        try:
            yield current
        finally:
            self._loop_calls_step = True
            self.current = None
        self._sharding.end_step()
