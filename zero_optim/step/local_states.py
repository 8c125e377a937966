"""The states of the local optimizers: as they are seen, saved and loaded."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from zero_optim.plan.groups import ParamGroup, options_of, params_of
from zero_optim.probe.saved import BESIDE, beside_of, has_own_dict
from zero_optim.step.built import BuiltOptimizer

_STATE = attrgetter("optimizer.state")


class LocalStates:
    """The states of the optimizers that a `LocalOptimizer` keeps in a list."""

    def __init__(self, built: Sequence[BuiltOptimizer]) -> None:
        self._built = built

    @property
    def all(self) -> list[dict[Any, Any]]:
        """The state of each optimizer: leaf -> entries, and any global entries."""
        return list(map(_STATE, self._built))

    def replace(self, states: Sequence[dict[Any, Any]]) -> None:
        """Replace the state of each optimizer."""
        for built, state in zip(self._built, states, strict=True):
            built.optimizer.state = state  # type: ignore[assignment]

    def number_of(self, leaf: object) -> int:
        """Return the index in `all` of a leaf's optimizer; 0 if none."""
        others = (map(id, params_of(built.optimizer.param_groups)) for built in self._built[1:])
        return next((number for number, ids in enumerate(others, 1) if id(leaf) in ids), 0)

    def initial(self, groups: list[ParamGroup]) -> dict[Any, Any]:
        """Return the state of fresh optimizers over all of ``groups``; most classes have none."""
        state: dict[Any, Any] = {}
        for built in self._built:
            own = [groups[number] for number in built.given]
            fresh = built.spec.build([{**options_of(each), "params": [*each["params"]]} for each in own])
            state.update(fresh.state)
        beside = beside_of(fresh) if self.has_own_dict else {}
        return {**state, BESIDE: beside} if beside else state

    def load(self, groups: list[ParamGroup], state: Mapping[Any, Any], *, exact: bool) -> None:
        """Replace the state, by leaf, through the classes' ``load_state_dict``; ``exact`` keeps dtypes."""
        for built in self._built:
            built.load(groups, state, exact=exact)
        for built in self._built:
            for number, own in zip(built.given, built.optimizer.param_groups, strict=True):
                fill_in(groups[number], own)

    def remember(self) -> Callable[[], None]:
        """Return a function that undoes a `load`; copies no tensor."""
        optimizers = [built.optimizer for built in self._built]
        saved = [(each, each.state, list(map(dict, each.param_groups))) for each in optimizers]

        def undo() -> None:
            for optimizer, state, groups in saved:
                optimizer.state, optimizer.param_groups = state, groups

        return undo

    def check_dicts(self) -> None:
        """Raise TypeError if a class's state cannot be saved and resumed, as that of many wrappers."""
        for built in self._built:
            built.check_saved()
        names = [built.spec.name for built in self._built if has_own_dict(built.optimizer)]
        if names and len(self._built) > 1:
            raise TypeError(
                f"{names[0]} overrides state_dict(), so its state cannot be saved with that of other classes "
                "in one optimizer: give it an optimizer of its own"
            )

    def beside(self) -> dict[str, Any]:
        """Return what a class saves beside its state, as a global entry: Note [Beside the state]."""
        beside = beside_of(self._built[0].optimizer) if self.has_own_dict else {}
        return {BESIDE: beside} if beside else {}

    @property
    def has_own_dict(self) -> bool:
        """Whether there is one class, with a ``state_dict`` of its own that can be saved."""
        traits = self._built[0].traits
        is_saved = traits is not None and traits.unsaved is None
        return is_saved and len(self._built) == 1 and has_own_dict(self._built[0].optimizer)


def fill_in(public: ParamGroup, local: ParamGroup) -> None:
    """Give a public group the options that it lacks."""
    for key, value in options_of(local).items():
        public.setdefault(key, value)
