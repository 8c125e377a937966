"""What the backward passes so far have taught, as far as later ones need it."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.backward_pass import Kind, PassTerms


@dataclass(slots=True)
class History:
    """Grows by `conclude` at the end of each pass; made anew by `Reducer.reset`.

    Args:
        num_params: how many parameters there are.

    Attributes:
        num_passes: backward passes that were reduced.
        num_buckets_reduced: in the last one.
        last_order: parameters in the order in which the gradients of this rank's last pass came.
        looks_static: whether the same parameters were used in all passes.
        rebuild_is_due: buckets are to follow the order of the pass that was the last.
        has_rebuilt: they do by now.
        learnt: how many gradients each parameter gets in a static graph, None until that is known.
        unused: by parameter, whether no rank has a gradient for it in a static graph.
        undefined: those of them that take part on this rank all the same.
        carried: by parameter, whether it has a gradient from a pass that was not reduced.
    """

    num_params: InitVar[int]
    num_passes: int = 0
    num_buckets_reduced: int = 0
    last_order: list[int] = field(default_factory=list)
    looks_static: bool = True
    rebuild_is_due: bool = False
    has_rebuilt: bool = False
    learnt: list[int] | None = None
    undefined: tuple[int, ...] = ()
    unused: list[bool] = field(init=False)
    carried: list[bool] = field(init=False)

    def __post_init__(self, num_params: int) -> None:
        self.unused = [False] * num_params
        self.carried = [False] * num_params

    def order(self) -> list[int]:
        """Give all parameters in the order in which gradients come, those that had none last."""
        return self.last_order + sorted(set(range(len(self.unused))) - set(self.last_order))

    def terms(self, options: ReducerOptions, divisor: float, can_carry_word: bool) -> PassTerms:
        """Settle how the next pass is to go.

        Args:
            options: of the reducer.
            divisor: of the gradients.
            can_carry_word: whether the last bucket can carry word of a failure.
        """
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
        """Learn from a pass that has ended.

        Args:
            calls: by parameter, how many gradients it got.
            order: parameters in the order in which their gradients came.
            unused: by parameter, whether no rank used it.
            options: of the reducer.
        """
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
