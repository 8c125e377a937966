"""What one backward pass leaves to the next."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from zero_optim.ddp.reducer.assignment import ReducerOptions

# every: each parameter must get one gradient. some: it may get none. learning: nothing is known yet, so
# nothing is reduced before the end. learnt: each must get as many as in the pass that was there to learn.
Kind = Literal["every", "some", "learning", "learnt"]


@dataclass(slots=True)
class History:
    """Facts learnt from the passes so far; `Reducer.reset` makes it anew."""

    num_params: InitVar[int]
    num_passes: int = 0  # that were reduced
    num_buckets_reduced: int = 0  # in the last one
    last_order: list[int] = field(default_factory=list)  # parameters as gradients of the last pass came here
    looks_static: bool = True  # the same parameters were used in all passes
    rebuild_is_due: bool = False  # buckets are to follow the order of the last pass
    has_rebuilt: bool = False  # they do by now
    learnt: list[int] | None = None  # gradients of each parameter in a static graph, once that is known
    undefined: tuple[int, ...] = ()  # unused ones of it that took part: an ``autograd.Function`` gave None
    unused: list[bool] = field(init=False)  # by parameter, in a static graph: no rank has a gradient
    carried: list[bool] = field(init=False)  # by parameter: it has a gradient of a pass that was not reduced

    def __post_init__(self, num_params: int) -> None:
        self.unused = [False] * num_params
        self.carried = [False] * num_params

    def kind(self, options: ReducerOptions) -> Kind:
        """Return the kind of the next pass."""
        if options.static_graph:
            return "learning" if self.learnt is None else "learnt"
        return "some" if options.find_unused_parameters else "every"

    def order(self) -> list[int]:
        """Return all parameters in the order of gradients; the last have none."""
        return self.last_order + sorted(set(range(len(self.unused))) - set(self.last_order))

    def conclude(
        self, calls: Sequence[int], order: Sequence[int], unused: Sequence[bool], options: ReducerOptions
    ) -> None:
        """Learn from an ended pass: gradients by parameter, their order, parameters that no rank used."""
        is_usual = order == self.last_order  # compared faster than sets are made
        if self.num_passes and not is_usual and set(order) != set(self.last_order):
            self.looks_static = False
        self.num_passes += 1
        self.last_order = list(order)
        if options.static_graph and self.learnt is None:
            self.learnt = list(calls)
            self.unused = list(unused)
            self.undefined = tuple(index for index, count in enumerate(calls) if count and unused[index])
        num_watched = 2 if options.static_graph else 1  # as in PyTorch's reducer
        if self.num_passes == num_watched and (options.static_graph or not options.find_unused_parameters):
            self.rebuild_is_due = True
