"""What one backward pass leaves to the next."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.backward_pass import Kind, PassTerms
from zero_optim.ddp.reducer.graph import UnusedSearch
from zero_optim.ddp.reducer.report import FailureReport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future


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
    undefined: tuple[int, ...] = ()  # those of the unused that take part on this rank all the same
    unused: list[bool] = field(init=False)  # by parameter, in a static graph: no rank has a gradient
    carried: list[bool] = field(init=False)  # by parameter: it has a gradient of a pass that was not reduced

    def __post_init__(self, num_params: int) -> None:
        self.unused = [False] * num_params
        self.carried = [False] * num_params

    def order(self) -> list[int]:
        """Return all parameters in the order of gradients; those without one come last."""
        return self.last_order + sorted(set(range(len(self.unused))) - set(self.last_order))

    def terms(self, options: ReducerOptions, divisor: float, can_carry_word: bool) -> PassTerms:
        """Fix the terms of the next pass; ``can_carry_word``: the last bucket can carry word of a failure."""
        kind: Kind = "some" if options.find_unused_parameters else "every"
        if options.static_graph:
            kind = "learning" if self.learnt is None else "learnt"
        expected = self.learnt or [0 if kind == "learning" else 1] * len(self.unused)
        return PassTerms(
            kind,
            expected,
            skips_unused=options.skip_all_reduce_unused_params and kind == "some",
            failure_word_in_last_bucket=can_carry_word and kind in ("every", "learnt"),
            divisor=divisor,
            carried=self.carried,
            undefined=self.undefined,
        )

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


@dataclass(slots=True, eq=False)
class UpcomingPass:
    """Settings for the next backward pass, each used once."""

    wanted: Callable[[bool], bool] | None  # see `Reducer`
    is_expected: bool = False  # the last forward pass was one whose backward pass is to be reduced
    divisor: Callable[[], float] | None = None  # of the gradients; None for the number of ranks
    search: UnusedSearch = field(default_factory=UnusedSearch)
    unread: list[FailureReport] = field(default_factory=list)  # of passes that have ended
    futures: list["Future[object]"] = field(default_factory=list)  # waited for when the pass ends

    def is_reduced(self, *, was_prepared: bool) -> bool:
        """Whether to reduce a pass that begins; ``was_prepared``: through an output given to `prepare`."""
        return self.wanted is None or self.wanted(was_prepared or self.is_expected)

    @property
    def in_join(self) -> bool:
        """Whether the last forward pass was inside ``Join``."""
        return self.divisor is not None

    def pop_unused(self, learnt: Sequence[int] | None, params: Sequence["Tensor"]) -> list[int]:
        """Return the parameters that get no gradient in the pass that has just begun."""
        if learnt is not None:
            return [index for index, calls in enumerate(learnt) if not calls]
        return self.search.pop_unused(params)
