"""The local optimizer: the user's classes over the leaves of this rank, and their states."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import ParamGroup, describe_options, options_of, params_of
from zero_optim.plan.option_values import OptionKey, Plain, plain
from zero_optim.plan.pieces import Pieces
from zero_optim.probe.saved import BESIDE, beside_of, has_own_dict
from zero_optim.probe.traits import Traits
from zero_optim.step.built import BuiltOptimizer
from zero_optim.step.spec import CutRowsOf, GroupSpec, OptimizerSpec

_STATE, _STEP = attrgetter("optimizer.state"), attrgetter("step")
_PLAIN = (bool, int, float, complex, str, type(None))


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
                _fill_in(groups[number], own)

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


class LocalOptimizer:
    """The user's optimizers over one rank's leaves: one for each ``optimizer_class``, one for the rest."""

    def __init__(
        self,
        default: OptimizerSpec,
        groups: list[ParamGroup],
        specs: Sequence[GroupSpec],
        owned: Mapping[Tensor, Tensor],
        assume_separable: bool,
        saves: bool,
    ) -> None:
        self.default = default
        self._saves = saves
        self._is_tried = not assume_separable
        self._leaf_of = dict(owned)
        self.members: list[list[Tensor]] = []  # of the public groups, which the local ones follow
        self._steps_parts = False
        self._built: list[BuiltOptimizer] = []
        self.states = LocalStates(self._built)
        self.num_groups = len(groups)
        for spec in [*(each.spec for each in specs if each.spec is not default), default]:
            given = {number: each for number, each in enumerate(specs) if each.spec is spec}
            if given:
                own = [_over_leaves(groups[number], self._leaf_of) for number in given]
                self._built.append(BuiltOptimizer(given, own, is_tried=self._is_tried))
        self._check_saves()
        for public, local in zip(groups, self._groups(), strict=True):
            _fill_in(public, local)

    def take_attributes(self, former: "LocalOptimizer") -> None:
        """Take over attributes with plain values, which users or methods of the classes may have set."""
        for built, other in zip(self._built, former._built, strict=True):
            plain_ones = {key: v for key, v in vars(other.optimizer).items() if type(v) in _PLAIN}
            vars(built.optimizer).update(plain_ones)

    def describe_specs(self) -> list[str]:
        """Describe the classes and their arguments, to compare ranks."""
        return [f"optimizer {built.spec.describe()} for groups {[*built.given]}" for built in self._built]

    @property
    def specs(self) -> list[GroupSpec]:
        """What each public group gave."""
        every = {number: given for built in self._built for number, given in built.given.items()}
        return [every[number] for number in sorted(every)]

    def require_parts(self) -> None:
        """Step some parameters at a time from now on; ValueError, for later groups too, if a class cannot."""
        for built in self._built:
            built.check_parts()
        self._steps_parts = True

    @property
    def can_step_parts(self) -> bool:
        """Whether trials show that some parameters can be stepped at a time; equal on every rank."""
        return all(built.traits is not None and built.traits.steppable_in_parts for built in self._built)

    def _check_saves(self) -> None:
        try:
            if self._saves:
                self.states.check_dicts()
        except TypeError as error:
            hint = "To train it all the same, build the optimizer with allow_unsaved=True"
            raise TypeError(f"{error}. {hint}") from None

    def traits(self) -> list[tuple[str, Traits | None]]:
        """Each class's probe result; None if not probed."""
        return [(built.spec.name, built.traits) for built in self._built]

    def answers(self) -> list[bool]:
        """Return the probe results, as bools for ranks to combine."""
        return [answer for _, traits in self.traits() if traits is not None for answer in traits.answers()]

    def combine(self, answers: Iterable[bool]) -> None:
        """Keep the probe results that hold on every rank: processors may differ, decisions must not."""
        rest = iter(answers)
        for built in self._built:
            built.combine(rest)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the shared optimizer, or of the first one."""
        return (self._shared() or self._built[0]).optimizer.defaults

    @property
    def spares_gradients(self) -> bool:
        """Whether steps leave gradients unchanged; some classes add weight decay to them."""
        return all(type(built.optimizer).__module__.startswith("torch.optim.") for built in self._built)

    @property
    def moves_frozen(self) -> bool:
        """Whether a probed class changed parameters without a gradient; equal on every rank."""
        return any(built.traits is not None and built.traits.moves_frozen for built in self._built)

    def of_group(self, number: int) -> BuiltOptimizer:
        """Return the optimizer of a public group."""
        for built in self._built:
            if number in built.given:
                return built
        raise self._other_groups(number + 1)

    def _other_groups(self, count: int) -> ValueError:
        return ValueError(
            f"the optimizer has {self.num_groups} parameter groups, but param_groups lists {count}: leave "
            "the list as it is, and add groups with add_param_group(), on all ranks"
        )

    def _shared(self) -> BuiltOptimizer | None:
        return next((built for built in self._built if built.spec is self.default), None)

    def check_cuts(
        self, groups: list[ParamGroup], cut_rows: CutRowsOf, pieces: Mapping[Tensor, Pieces]
    ) -> None:
        """Raise ValueError for options that allow no cuts."""
        for built in self._built:
            built.check_cuts(groups, cut_rows, pieces)

    def find(self, name: str) -> list[Any]:
        """Return a public attribute of each optimizer that has it."""
        return [getattr(built.optimizer, name) for built in self._built if hasattr(built.optimizer, name)]

    def assign(self, name: str, value: object) -> bool:
        """Set a public attribute of each optimizer that has it; returns whether one does."""
        having = [built.optimizer for built in self._built if hasattr(built.optimizer, name)]
        for optimizer in having:
            setattr(optimizer, name, value)
        return bool(having)

    def call(
        self,
        groups: list[ParamGroup],
        methods: Sequence[Callable[..., Any]] | None,
        *args: object,
        **kwargs: object,
    ) -> Any:  # noqa: ANN401 - whatever the class returns
        """Call the optimizers' own methods, or `BuiltOptimizer.step`, under the public groups' options.

        Returns the first result.
        """
        if len(groups) != self.num_groups:
            raise self._other_groups(len(groups))
        before = [built.take_options(groups) for built in self._built]
        called = map(_STEP, self._built) if methods is None else methods
        results = [method(*args, **kwargs) for method in called]
        for built, each in zip(self._built, before, strict=True):
            built.write_options(groups, each)
        return results[0]

    def follow_members(self, groups: Sequence[ParamGroup]) -> None:
        """Step what the public groups list now."""
        self.members = [list(group["params"]) for group in groups]
        for public, local in zip(groups, self._groups(), strict=False):  # `call` compares lengths
            local["params"] = _leaves_of(public, self._leaf_of)

    def origins(self, options: Sequence[Mapping[str, Plain]]) -> tuple[list[OptionKey], set[OptionKey]]:
        """Return the options not set by the user that have the class's default, and those a class changed."""
        defaults = [key for built in self._built for key in built.defaults_in(options)]
        written = {key for built in self._built for key in built.written}
        numbers = range(len(options))
        return defaults, written | {(n, key) for n in numbers for key in self._traits_of(n).idle}

    def compared(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """Return groups without idle entries: Note [Idle entries] in `zero_optim.probe.comparison`."""
        compared = []
        for traits, group in zip(map(self._traits_of, range(len(groups))), groups, strict=True):
            retyped = {key: plain(group[key]) for key in traits.retyped & group.keys()}
            compared.append({key: v for key, v in {**group, **retyped}.items() if key not in traits.idle})
        return compared

    def describe_options(self, groups: Sequence[ParamGroup]) -> list[str]:
        """Describe each group's options for ranks to compare."""
        return describe_options(self.compared(groups))

    def _traits_of(self, number: int) -> Traits:
        traits = (built.traits for built in self._built if number in built.given)
        return next(traits, None) or Traits()

    def shown(self) -> tuple[tuple[Optimizer, ...], list[ParamGroup]]:
        """Return the optimizers, and their groups in the public order."""
        return tuple(built.optimizer for built in self._built), self._groups()

    def add_group(self, group: ParamGroup, given: GroupSpec, owned: Mapping[Tensor, Tensor]) -> None:
        """Add the owned part of a public group, and the class's defaults to the public group."""
        number, shared = self.num_groups, self._shared()
        self.num_groups += 1
        self._leaf_of.update(owned)
        part = _over_leaves(group, self._leaf_of)
        if given.spec is not self.default or shared is None:
            self._built.append(BuiltOptimizer({number: given}, [part], is_tried=self._is_tried))
        else:
            shared.add_group(number, given, part)
        if self._steps_parts:
            self.of_group(number).check_parts()
        self._check_saves()
        _fill_in(group, self._groups()[number])

    def drop_groups(self, count: int) -> None:
        """Keep only the first ``count`` groups."""
        self.num_groups = count
        for built in self._built:
            built.drop_groups(count)
        self._built[:] = [built for built in self._built if built.given]
        leaves = set(params_of(self._groups()))
        self._leaf_of = {param: leaf for param, leaf in self._leaf_of.items() if leaf in leaves}

    def _groups(self) -> list[ParamGroup]:
        if len(self._built) == 1:
            return self._built[0].optimizer.param_groups
        numbered: dict[int, ParamGroup] = {}
        for built in self._built:
            numbered.update(zip(built.given, built.optimizer.param_groups, strict=True))
        return [numbered[number] for number in sorted(numbered)]


def _leaves_of(group: ParamGroup, leaf_of: Mapping[Tensor, Tensor]) -> list[Tensor]:
    return [leaf_of[param] for param in group["params"] if param in leaf_of]


def _over_leaves(group: ParamGroup, leaf_of: Mapping[Tensor, Tensor]) -> ParamGroup:
    return {"params": _leaves_of(group, leaf_of), **options_of(group)}


def _fill_in(public: ParamGroup, local: ParamGroup) -> None:
    """Give a public group the options that it lacks."""
    for key, value in options_of(local).items():
        public.setdefault(key, value)
