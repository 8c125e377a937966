"""Recipes as data: which operation happens to a bucket at which moment of an iteration. No torch.

A recipe is a `Schedule`, one row of the table. Each bucket has one, and `Engine.on` in
`zero_optim.shard.engine` runs what it has for a moment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType


class Operation(Enum):
    """One of the five things that happen to a bucket, in the order in which a moment has them."""

    REDUCE = "reduce"  # its gradients, over the ranks; of DTensors rows go to owners
    STEP = "step"  # the rows that this rank owns
    GATHER = "gather"  # start to send each owner's row to all ranks; of DTensors back to their holders
    WAIT = "wait"  # until the rows have come
    FREE = "free"  # what this rank does not own: parameters after a module, gradients after a reduction


class Moment(Enum):
    """When something happens, in the order of an iteration."""

    BEFORE_FORWARD = "before a module's forward pass"
    AFTER_FORWARD = "after it"
    BEFORE_BACKWARD = "before a module's backward pass"
    BUCKET_FULL = "a bucket has all gradients"
    BUCKET_REDUCED = "a bucket is reduced"
    AFTER_MODULE = "after a module's backward pass"
    AFTER_BACKWARD = "after the backward pass"
    STEP = "step()"


class Placement(Enum):
    """What of a bucket a rank holds."""

    WHOLE = "whole on every rank"
    ROW = "own row"
    HELD = "rows, kept by somebody else"


_USES = Moment.BEFORE_FORWARD, Moment.BEFORE_BACKWARD


@dataclass(frozen=True, slots=True)
class Schedule:
    """One recipe, and what a rank holds between steps; ValueError if something is left out."""

    moments: Mapping[Moment, tuple[Operation, ...]]
    parameters: Placement = Placement.WHOLE
    gradients: Placement = Placement.WHOLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "moments", MappingProxyType(dict(self.moments)))
        for operations in self.moments.values():
            if list(operations) != [each for each in Operation if each in operations]:
                raise ValueError(f"expected operations in the order of Operation, got {operations}: {self}")
        if self.parameters is Placement.HELD:
            moves = set(self[Moment.STEP]) - {Operation.STEP}
            back = {Operation.REDUCE, Operation.GATHER, Operation.WAIT}
            if Operation.STEP not in self[Moment.STEP] or moves not in (set(), back) or len(self.moments) > 1:
                raise ValueError(
                    f"expected a step of held rows, and a move to owners and back, or none: {self}"
                )
            return
        if Operation.REDUCE not in self[Moment.BUCKET_FULL] or Operation.STEP not in self[Moment.STEP]:
            raise ValueError(f"expected full buckets to be reduced, and stepped in step() at last: {self}")
        is_whole = self.parameters is Placement.WHOLE
        for moment in self._with(Operation.STEP) if is_whole else _USES:
            if not self._follows(moment, Operation.GATHER) or not self._follows(moment, Operation.WAIT):
                raise ValueError(f"expected a gather at {moment.value!r}, and a wait behind it: {self}")
        freed = self._with(Operation.FREE)
        ends = Moment.AFTER_BACKWARD in freed, Moment.BUCKET_FULL in freed
        kept = {Moment.BUCKET_FULL} if is_whole else set(Moment)
        if ends != (not is_whole, self.gradients is Placement.ROW) or not kept.issuperset(freed):
            raise ValueError(f"expected all but own rows to be freed after use, nothing else: {self}")

    def __reduce__(self) -> "tuple[type[Schedule], tuple[object, ...]]":
        return Schedule, (dict(self.moments), self.parameters, self.gradients)

    def __getitem__(self, moment: Moment) -> tuple[Operation, ...]:
        """Return the operations at a moment, in order."""
        return self.moments.get(moment, ())

    def _with(self, operation: Operation) -> list[Moment]:
        return [moment for moment in Moment if operation in self[moment]]

    def _follows(self, moment: Moment, operation: Operation) -> bool:
        """Whether an operation comes at a moment, or later in the backward pass; a wait also in the next."""
        later = {moment, Moment.AFTER_BACKWARD} if moment is Moment.BUCKET_REDUCED else {moment}
        late = later | {Moment.BEFORE_FORWARD} if operation is Operation.WAIT else later
        return not late.isdisjoint(self._with(operation))

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
        Moment.AFTER_MODULE: (Operation.FREE,),
        Moment.AFTER_BACKWARD: (Operation.FREE,),
        Moment.STEP: (Operation.STEP,),
    },
    parameters=Placement.ROW,
    gradients=Placement.ROW,
)
HELD_ROWS = Schedule({Moment.STEP: (Operation.STEP,)}, Placement.HELD, Placement.HELD)
HELD_WHOLE = Schedule(
    {Moment.STEP: (Operation.REDUCE, Operation.STEP, Operation.GATHER, Operation.WAIT)},
    Placement.HELD,
    Placement.HELD,
)
# Named, for the page and tests. Buckets that every rank has whole get theirs by `Engine.run_by`, changed by
# `reduce_to_owners` and `read_by`, so its `lazily()` and `to_owners()` are valid too; those of units
# (`shard.store`) and of DTensors (`dtensor.held_values`) have one that never changes. A new recipe is a
# constant and a name here; who chooses it calls `Engine.run_by`, as `Iteration.overlap` does. Its case in
# tests/test_engine.py runs it; tests/test_flow.py compares docs/design.md.
RECIPES = MappingProxyType(
    {
        "ZeRO-1": ZERO1,
        "gather_lazily": LAZY,
        "zero_step": OVERLAP,
        "ZeRO-2": ZERO2,
        "ZeRO-3": ZERO3,
        "FSDP2, rows": HELD_ROWS,
        "FSDP2, whole": HELD_WHOLE,
    }
)
