"""Recipes as data: which operation happens to a bucket at which moment of an iteration. No torch.

A recipe is a `Schedule`. `Schedule.at` runs what it has for a moment; three places call it: a full bucket
(`ddp/reducer/backward_pass.py`), steps during the backward pass (`iteration/overlap.py`) and units
(`ddp/full/in_use.py`). `Sharding` and `Gathers` read the row themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import ParamSpec

P = ParamSpec("P")


class Operation(Enum):
    """One of the five things that happen to a bucket; all ranks do them in one order of buckets."""

    REDUCE = "reduce"  # its gradients, over the ranks
    STEP = "step"  # the rows that this rank owns
    GATHER = "gather"  # start to send each owner's row to all ranks
    WAIT = "wait"  # until the rows have come
    FREE = "free"  # what this rank does not own: parameters after a module, gradients after a reduction


class Moment(Enum):
    """When something happens, in the order of an iteration."""

    BEFORE_FORWARD = "before a module's forward pass"
    AFTER_FORWARD = "after it"
    BEFORE_BACKWARD = "before a module's backward pass"
    BUCKET_FULL = "a bucket has all gradients"
    BUCKET_REDUCED = "a bucket is reduced"
    AFTER_BACKWARD = "after the backward pass"
    STEP = "step()"


class Placement(Enum):
    """What of a bucket a rank holds."""

    WHOLE = "whole on every rank"
    ROW = "own row"


_USES = Moment.BEFORE_FORWARD, Moment.BEFORE_BACKWARD


@dataclass(frozen=True, slots=True)
class Schedule:
    """One recipe, and what a rank holds between steps; ValueError if something is left out."""

    moments: Mapping[Moment, tuple[Operation, ...]]
    parameters: Placement = Placement.WHOLE
    gradients: Placement = Placement.WHOLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "moments", MappingProxyType(dict(self.moments)))
        if Operation.REDUCE not in self[Moment.BUCKET_FULL] or Operation.STEP not in self[Moment.STEP]:
            raise ValueError(f"expected full buckets to be reduced, and stepped in step() at last: {self}")
        is_whole = self.parameters is Placement.WHOLE
        for moment in self._with(Operation.STEP) if is_whole else _USES:
            if Operation.GATHER not in self[moment] or not self._waits_behind(moment):
                raise ValueError(f"expected a gather at {moment.value!r}, and a wait behind it: {self}")
        freed = self._with(Operation.FREE)
        ends = Moment.AFTER_BACKWARD in freed, Moment.BUCKET_FULL in freed
        if ends != (not is_whole, self.gradients is Placement.ROW) or (
            is_whole and Moment.AFTER_FORWARD in freed
        ):
            raise ValueError(f"expected all but own rows to be freed after use, nothing else: {self}")

    def __getitem__(self, moment: Moment) -> tuple[Operation, ...]:
        """Return the operations at a moment, in order."""
        return self.moments.get(moment, ())

    def at(
        self,
        moment: Moment,
        operations: Mapping[Operation, Callable[P, object]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run the operations at a moment, in order; KeyError if the caller lacks one."""
        for operation in self[moment]:
            operations[operation](*args, **kwargs)

    def _with(self, operation: Operation) -> list[Moment]:
        return [moment for moment in Moment if operation in self[moment]]

    def _waits_behind(self, moment: Moment) -> bool:
        in_backward = {Moment.AFTER_BACKWARD} if moment is Moment.BUCKET_REDUCED else set()
        return not in_backward.union({moment, Moment.BEFORE_FORWARD}).isdisjoint(self._with(Operation.WAIT))

    def lazily(self) -> "Schedule":
        """Return the recipe in which modules wait for what steps gathered."""
        moments = {
            moment: tuple(each for each in operations if each is not Operation.WAIT)
            for moment, operations in self.moments.items()
        }
        return replace(self, moments={**moments, Moment.BEFORE_FORWARD: (Operation.WAIT,)})

    def to_owners(self) -> "Schedule":
        """Return the recipe in which gradients are reduced to their owners alone."""
        full = {Moment.BUCKET_FULL: (Operation.REDUCE, Operation.FREE)}
        return replace(self, moments={**self.moments, **full}, gradients=Placement.ROW)


ZERO1 = Schedule(
    {
        Moment.BUCKET_FULL: (Operation.REDUCE,),
        Moment.STEP: (Operation.STEP, Operation.GATHER, Operation.WAIT),
    }
)
LAZY = ZERO1.lazily()
OVERLAP = Schedule(
    {
        Moment.BUCKET_FULL: (Operation.REDUCE,),
        Moment.BUCKET_REDUCED: (Operation.STEP, Operation.GATHER),
        Moment.AFTER_BACKWARD: (Operation.WAIT,),
        Moment.STEP: (Operation.STEP, Operation.GATHER, Operation.WAIT),
    }
)
ZERO2 = ZERO1.to_owners()
ZERO3 = Schedule(
    {
        Moment.BEFORE_FORWARD: (Operation.GATHER, Operation.WAIT),
        Moment.AFTER_FORWARD: (Operation.FREE,),
        Moment.BEFORE_BACKWARD: (Operation.GATHER, Operation.WAIT),
        Moment.BUCKET_FULL: (Operation.REDUCE, Operation.FREE),
        Moment.AFTER_BACKWARD: (Operation.FREE,),
        Moment.STEP: (Operation.STEP,),
    },
    parameters=Placement.ROW,
    gradients=Placement.ROW,
)
# reshard_after_forward=False: parameters stay whole from the forward to the backward pass
ZERO3_KEPT = replace(ZERO3, moments={**ZERO3.moments, Moment.AFTER_FORWARD: ()})
RECIPES = MappingProxyType(
    {"ZeRO-1": ZERO1, "gather_lazily": LAZY, "zero_step": OVERLAP, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3}
)
