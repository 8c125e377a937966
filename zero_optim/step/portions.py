"""Steps of some parameters at a time, for owned tensors in files.

Note [Steps in portions]
    A step takes parameters in the order of their rows, as many at a time as the budget allows, and writes
    these out before the next. The class must support steps in parts; then the bits are those of one call. A
    probe measures the state (`state_entries`); the first step warns of a class with more.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.pieces import Piece
from zero_optim.shard.keeping import FileKeeping, nbytes_of
from zero_optim.shard.mapped import PAGE, in_pages
from zero_optim.step.averages import WeightAverage
from zero_optim.step.leaves import Leaves
from zero_optim.step.local import LocalOptimizer

logger = logging.getLogger("zero_optim")


class KeptState:
    """What a rank keeps in files, by parameter."""

    def __init__(
        self, keeping: FileKeeping, leaves: Leaves, average: WeightAverage, local: LocalOptimizer
    ) -> None:
        self.keeping = keeping
        self._leaves = leaves
        self._average = average
        self._local = local
        self._expected: dict[Tensor, int] = {}  # of each owned parameter, the bytes of state it will have
        self._has_warned = False

    def reserve(self, groups: Sequence[ParamGroup], owned: Mapping[Tensor, Piece]) -> None:
        """Check the budget for each owned parameter, and reserve files.

        ValueError for a budget too small, or a class that cannot step in portions; OSError for a full disk.
        """
        for name, traits in self._local.traits():
            if traits is not None and not traits.steppable_in_parts:
                raise ValueError(
                    f"{name} cannot be stepped some parameters at a time, as offload needs it: "
                    f"{traits.counting}. Leave offload out"
                )
        self._local.check_parts()  # groups that are added later must bear it too
        for number, group in enumerate(groups):
            self._expect(number, group, owned)
        needs = {param: self._need(param) for param in self._expected}
        most = max(needs, key=needs.__getitem__, default=None)
        if most is not None and needs[most] > self.keeping.budget:
            place = next(place for place, param in enumerate(params_of(groups)) if param is most)
            raise ValueError(
                f"expected a budget of at least {needs[most]} bytes, which it takes to step what this rank "
                f"owns of {param_names(groups)[place]}, got {self.keeping.budget}"
            )
        ends = 8 * PAGE  # of tensors that end inside a page
        rows = map(self._leaves.rows, needs)
        there = sum(nbytes_of(each) for each in rows if self.keeping.holds(each))
        self.keeping.reserve(in_pages(sum(needs.values()) - there) + ends * len(needs))

    def _expect(self, number: int, group: ParamGroup, owned: Mapping[Tensor, Piece]) -> None:
        built = self._local.of_group(number)
        for param in group["params"]:
            if param in owned:
                self._expected[param] = len(built.shaped_entries(param.dim())) * nbytes_of(
                    self._leaves.leaf(param)
                )

    def add(self, number: int, group: ParamGroup, owned: Mapping[Tensor, Piece]) -> None:
        """Add the owned part of a new public group."""
        self._expect(number, group, owned)
        self.keep(owned)

    def _need(self, param: Tensor) -> int:
        """Return the bytes resident during a parameter's step; a new state entry counts twice."""
        rows, beside = nbytes_of(self._leaves.rows(param)), sum(map(nbytes_of, self._beside(param)))
        state = sum(map(nbytes_of, self._state_of(param)))
        if not state and self._expected[param]:
            state = self._expected[param] + nbytes_of(self._leaves.leaf(param))
        return 2 * rows + beside + state  # with the gradient

    # ------------------------------------------------------------------ steps

    def portions(self) -> Iterator[dict[Tensor, Tensor | None]]:
        """Yield at least one portion for `take_back`: parameter -> owned rows of the gradient, or None."""
        in_rows = [param for param in self._leaves.kept if param in self._expected]
        rest = [param for param in self._expected if param not in self._leaves.kept]
        items = [(param, self._need(param)) for param in (*in_rows, *rest)]
        for portion in self.keeping.portions(items):
            yield {param: self._leaves.own_gradient(param) for param in portion}
        if not items:
            yield {}
        if not self._has_warned:
            self._warn_of_more()

    def take_back(self, portion: Mapping[Tensor, Tensor | None]) -> None:
        """Write a portion out."""
        self.keep(portion)
        self.keeping.drop([grad for grad in portion.values() if grad is not None])

    def _warn_of_more(self) -> None:
        needs = [self._need(param) for param in self._expected]
        if needs and max(needs) > self.keeping.budget:
            self._has_warned = True
            logger.warning(
                "the class keeps more state than a trial has shown: stepping one parameter takes %d bytes, "
                "and the budget of offload is %d: more is resident in steps, or give a larger one",
                max(needs),
                self.keeping.budget,
            )

    def keep(self, params: Iterable[Tensor] | None = None) -> None:
        """Write out some parameters, or all; new tensors move to the files."""
        chosen = self._expected if params is None else params
        items = [(param, self._need(param)) for param in chosen]
        for portion in self.keeping.portions(items):
            rows = [self._leaves.kept[param] for param in portion if param in self._leaves.kept]
            more = [tensor for param in portion for tensor in (*self._beside(param), *self._state_of(param))]
            self.keeping.keep([*rows, *more])

    def _beside(self, param: Tensor) -> Iterator[Tensor]:
        for held in (self._leaves.masters, self._average.averages):
            if param in held:
                yield held[param]

    def _state_of(self, param: Tensor) -> Iterator[Tensor]:
        leaf = self._leaves.leaf(param)
        for state in self._local.states:
            if leaf in state:
                yield from _tensors_in(state[leaf])


def _tensors_in(value: object) -> Iterator[Tensor]:
    if type(value) in (Tensor, Parameter):
        yield value  # type: ignore[misc]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
