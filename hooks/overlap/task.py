"""What is known of one backward pass, and of each bucket in it that is to be stepped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from zero_optim.comm.started import Work
from zero_optim.hooks.bucket import TensorFuture
from zero_optim.hooks.overlap.owners import OwnerReduction
from zero_optim.step.overlap import StepPart


@dataclass(slots=True, eq=False)
class SteppedPass:
    """What is known of one backward pass that steps: made by its first bucket, dropped when it has ended.

    Attributes:
        joined: this rank has no backward pass, and only takes part: it ran out of inputs, or the pass broke
            off before its first bucket.
        abandon: called when something failed: process groups it failed on are not to be lent again.
        has_begun: the optimizer's step has begun.
        is_complete: its last bucket has come.
        number: of the bucket that came last.
        held: buckets that have come and are not in line yet.
        asked: the engine's numbers of the passes that will call `Stepper._end`.
        late: parameters to step when it has ended; see Note [Gradients that are all zero] in `steps`.
        error: what failed first; see Note [Failures] in `stepper`.
    """

    joined: bool
    abandon: Callable[[], None]
    has_begun: bool = False
    is_complete: bool = False
    number: int = -1
    held: list["Task"] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    late: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Keep the first exception, to be raised when backward has ended."""
        if self.error is None:
            self.error = error
        self.abandon()

    @contextmanager
    def minding(self) -> Iterator[None]:
        """Have whatever the body raises end as a failure of the pass."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            self.fail(error)

    def pop_held(self) -> list["Task"]:
        """Give the buckets that are not in line yet, once."""
        held, self.held = self.held, []
        return held

    def pop_late(self) -> list[Tensor]:
        """Give the late parameters, once."""
        late, self.late = self.late, []
        return late


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A bucket to be stepped.

    Attributes:
        of: the pass that it belongs to.
        part: its parameters.
        buffer: its gradients as they were given to the reduction.
        reduced: its reduction.
        all_used: some rank is known to have used each of its parameters.
        done: given to DDP; gets the reduced gradients.
    """

    of: SteppedPass
    part: StepPart
    buffer: Tensor
    reduced: Work | OwnerReduction
    all_used: bool
    done: TensorFuture

    def complete(self, result: Tensor) -> None:
        """Give DDP the reduced gradients. Raises nothing: DDP waits for it.

        If the future does not take them, it gets those that were given to the reduction.
        """
        for value in (result, self.buffer):
            try:
                self.done.set_result(value)
            except BaseException as error:  # noqa: BLE001 - raised when backward has ended
                self.of.error = self.of.error or error
            else:
                return
