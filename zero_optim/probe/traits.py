"""What an optimizer class tolerates: the result of `probe`, and the error message."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

# A class with one of these reasons is refused, though untried.
NEEDS_CLOSURE = (
    "its step() needs a closure that evaluates the model, and while it searches, each rank would "
    "have changed its own parameters only"
)
ELSEWHERE = "another rank, with another processor, found a difference"
NEEDS_SECOND_ORDER = "its step() needs second-order gradients, of backward(create_graph=True)"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a class with its options tolerates, bit for bit: texts are reasons against it.

    A new one is a field that allows by default, a trial in `zero_optim.probe.probe` that sets it, a bool in
    `answers` and `combined` if processors may differ, and who asks: `zero_optim.step.built` refuses a class,
    `zero_optim.step.local` steps accordingly, `zero_optim.explain` shows it.
    """

    coupling: str | None = None  # why parameters cannot be stepped by separate optimizers
    in_half: str | None = None  # the same of parameters in half precision
    counting: str | None = None  # why one optimizer cannot step part of its parameters at a time
    shape_use: str | None = None  # why a parameter cannot be cut in pieces
    untried: str | None = None  # why the class could not be tried at all
    unsaved: str | None = None  # why its state cannot be saved and resumed
    moves_frozen: bool = False  # whether a step changes parameters that never had a gradient
    idle: frozenset[str] = frozenset()  # entries of groups that differ between ranks, without influence
    retyped: frozenset[str] = frozenset()  # those that are one number in two types

    def answers(self) -> list[bool]:
        """Return what the class tolerates, as bools for ranks to combine."""
        return [self.counting is None, self.shape_use is None, not self.moves_frozen]

    def combined(self, common: Sequence[bool]) -> "Traits":
        """Return the traits of all ranks, from whether all say yes to each of `answers`."""
        in_parts, in_pieces, spares_frozen = common
        return replace(
            self,
            counting=None if in_parts else self.counting or ELSEWHERE,
            shape_use=None if in_pieces else self.shape_use or ELSEWHERE,
            moves_frozen=not spares_frozen,
        )

    @property
    def separable(self) -> bool:
        """Whether it may be sharded by whole parameters."""
        return self.untried is None and self.coupling is None

    @property
    def steppable_in_parts(self) -> bool:
        """Whether it may be stepped by buckets."""
        return self.separable and self.counting is None

    @property
    def elementwise(self) -> bool:
        """Whether parameters may be cut into 1-D pieces, to be shown; `cut_rows` tries cuts by rows."""
        return self.separable and self.shape_use is None


def refusal(optimizer_class: Callable[..., Optimizer], traits: Traits) -> str:
    """Return why a class is refused, and what to do."""
    name = getattr(optimizer_class, "__qualname__", None) or repr(optimizer_class)
    if traits.untried is not None and traits.untried not in (NEEDS_CLOSURE, NEEDS_SECOND_ORDER):
        return (
            f"{name} could not be tried, and nothing was found against it: {traits.untried}. If it treats "
            "every parameter by itself, assume_separable=True shards it untried; if you do not know that, "
            "use it without sharding"
        )
    what = (
        f"cannot be tried: {traits.untried}"
        if traits.untried is not None
        else "gives other results when each rank steps only its own parameters. Tried on small tensors, "
        f"bit for bit against one optimizer that steps them all: {traits.coupling}"
    )
    return (
        f"expected an optimizer that treats every parameter by itself, but {name} {what}. Use it without "
        "sharding, or choose another optimizer; assume_separable=True shards it all the same, for when you "
        "know better"
    )


def refusal_in_half(optimizer_class: Callable[..., Optimizer], traits: Traits) -> str:
    """Return why a class is refused for parameters in half precision, and what to do."""
    reason = f"with parameters of bfloat16, {traits.in_half}. master_dtype=torch.float32 steps copies of them"
    return refusal(optimizer_class, replace(traits, coupling=reason))
