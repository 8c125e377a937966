"""The local optimizer: the user's class or classes over the leaves this rank owns.

The public ``param_groups``, with every parameter, are the one truth for options. The local groups
hold only this rank's leaves; their options are overwritten from the public ones before each step
and read back after it, so that schedulers act on the former and classes that count in their groups
(schedule-free ones do) act on the latter.

A group may name its own ``optimizer_class``. Groups that do have an optimizer each, built with the
group's options as arguments; all others share the default one, as in ``torch.optim``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import PARAM_KEYS, ParamGroup, member_ids, options_of, params_of
from zero_optim.probe.shaped import ShapedKeys
from zero_optim.probe.traits import Traits, probe, refusal
from zero_optim.step.spec import OptimizerSpec


@dataclass(slots=True)
class _Part:
    """One optimizer and the public groups it steps, by index; its own groups are in that order."""

    recipe: OptimizerSpec
    optimizer: Optimizer
    groups: list[int]
    shaped: ShapedKeys
    given: list[ParamGroup]  # options of each group before the class filled in its own
    traits: Traits | None


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """Several optimizers as one, to be read.

    Args:
        optimizers: those that step this rank's part.
        param_groups: the groups of all of them, in the order in which the user gave them.
    """

    optimizers: tuple[Optimizer, ...]
    param_groups: list[ParamGroup]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state of all of them, by leaf; the mapping is a copy."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}


class LocalOptimizer:
    """The user's optimizers over one rank's leaves. Does not communicate.

    Args:
        default: what steps the groups that name no class of their own.
        groups: the public groups; options the classes fill in are added to them. A group keeps its
            place even where this rank owns none of it.
        recipes: for each public group its own recipe, or None.
        owned: this rank's parameters, each with the leaf that is stepped for it.
        assume_separable: take classes without trying what sharding does to them.

    Raises:
        TypeError: a recipe does not build a ``torch.optim.Optimizer``.
        ValueError: sharding would change what a class does.
    """

    def __init__(
        self,
        default: OptimizerSpec,
        groups: list[ParamGroup],
        recipes: list[OptimizerSpec | None],
        owned: Mapping[Tensor, Tensor],
        assume_separable: bool,
    ) -> None:
        self._default = default
        self._assume_separable = assume_separable
        self._leaf_of = dict(owned)
        self._steps_parts = False
        self._members: list[list[int]] = []  # the public groups' members that the local ones follow
        self._parts: list[_Part] = []
        for number, (group, recipe) in enumerate(zip(groups, recipes, strict=True)):
            if recipe is not None:
                self._add_part(recipe, [number], [_owned_part(group, owned)])
        shared = [number for number, recipe in enumerate(recipes) if recipe is None]
        if shared:
            self._add_part(default, shared, [_owned_part(groups[number], owned) for number in shared])
        self._fill_in(groups)

    def _add_part(self, recipe: OptimizerSpec, numbers: list[int], owned_parts: list[ParamGroup]) -> None:
        shaped = ShapedKeys(recipe.optimizer_class, dict(recipe.arguments))
        given = [options_of(group) for group in owned_parts]  # as given: the class will fill in its own
        leaves = _leaf_ids(owned_parts)  # taken now: the class may change the dicts it is given
        optimizer = recipe.build(
            owned_parts
        )  # before anything is tried, so that wrong options are told first
        _check_followed(recipe, optimizer, leaves)
        self._parts.append(_Part(recipe, optimizer, numbers, shaped, given, self._tried(recipe, given)))

    def _tried(self, recipe: OptimizerSpec, groups: list[ParamGroup]) -> Traits | None:
        """Find out what a class tolerates, and refuse it if sharding would change it.

        Raises:
            ValueError: it would, and nobody said that they know better.
        """
        if self._assume_separable:
            return None
        traits = probe(recipe.optimizer_class, recipe.arguments, groups)
        if not traits.separable:
            raise ValueError(refusal(recipe.optimizer_class, traits))
        if self._steps_parts:
            recipe.check_parts(traits)
        return traits

    def check_parts(self) -> None:
        """Refuse classes whose step cannot be taken some parameters at a time, from now on.

        Raises:
            ValueError: there is one; says why.
        """
        for part in self._parts:
            part.recipe.check_parts(part.traits)
        self._steps_parts = True

    def traits(self) -> list[tuple[str, Traits | None]]:
        """List what was found of each class; None where it was not tried."""
        return [(part.recipe.name, part.traits) for part in self._parts]

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the shared optimizer, or of the first one if no group is its."""
        first = self._shared_part() or self._parts[0]
        return first.optimizer.defaults

    @property
    def num_groups(self) -> int:
        """How many groups are stepped."""
        return sum(len(part.groups) for part in self._parts)

    @property
    def spares_gradients(self) -> bool:
        """Whether steps surely leave gradients as they are; some outside PyTorch add weight decay to them."""
        return all(type(part.optimizer).__module__.startswith("torch.optim.") for part in self._parts)

    def shown(self) -> Optimizer | OptimizerView:
        """Give the optimizer for users to look at, or a view if there are several."""
        optimizers = tuple(part.optimizer for part in self._parts)
        return optimizers[0] if len(optimizers) == 1 else OptimizerView(optimizers, self._groups())

    @property
    def moves_frozen(self) -> bool:
        """Whether a class, tried, changed parameters that never had a gradient; the same on every rank."""
        return any(part.traits is not None and part.traits.moves_frozen for part in self._parts)

    @property
    def states(self) -> list[Mapping[Any, Any]]:
        """The state of each optimizer: leaf -> entries, and global entries if any."""
        return [part.optimizer.state for part in self._parts]

    def step(
        self, groups: list[ParamGroup], closure: Callable[[], float] | None, **kwargs: object
    ) -> float | None:
        """Step every leaf under the options of the public groups.

        Returns:
            What the class's ``step`` returns, None unless there is a closure.
        """
        if closure is not None and len(self._parts) > 1:  # once, for all of them
            with torch.enable_grad():
                loss = closure()
            self.call(groups, self.find("step"), **kwargs)
            return loss
        arguments = () if closure is None else (closure,)
        stepped: float | None = self.call(groups, self.find("step"), *arguments, **kwargs)
        return stepped

    def find(self, name: str) -> list[Any]:
        """Look a public attribute up on each optimizer that has it."""
        return [getattr(part.optimizer, name) for part in self._parts if hasattr(part.optimizer, name)]

    def call(
        self, groups: list[ParamGroup], methods: list[Callable[..., Any]], *args: object, **kwargs: object
    ) -> Any:  # noqa: ANN401 - whatever the class returns
        """Call methods of the optimizers' own under the options of the public groups.

        Returns:
            What the first one returned.
        """
        with self._under_options_of(groups):
            results = [method(*args, **kwargs) for method in methods]
            return results[0]

    def step_some(self, groups: list[ParamGroup], leaves: Collection[Tensor]) -> None:
        """Step some of the leaves, as `trials.step_in_parts` does, under the options of the public groups."""
        chosen = {id(leaf) for leaf in leaves}
        with self._under_options_of(groups):
            for part in self._parts:
                _step_chosen(part.optimizer, chosen)

    @contextmanager
    def _under_options_of(self, groups: list[ParamGroup]) -> Iterator[None]:
        """Give the local groups options and members of the public ones, and these what the class changed."""
        for public, local in zip(groups, self._groups(), strict=True):
            _set_options(local, public)
        self._follow_members(groups)
        yield
        for public, local in zip(groups, self._groups(), strict=True):
            _set_options(public, local)

    def _follow_members(self, groups: list[ParamGroup]) -> None:
        """Give the local groups the leaves of what the public ones hold by now."""
        members = member_ids(groups)
        if members != self._members:
            for public, local in zip(groups, self._groups(), strict=True):
                local["params"] = [self._leaf_of[p] for p in public["params"] if p in self._leaf_of]
            self._members = members

    def add_group(
        self, group: ParamGroup, recipe: OptimizerSpec | None, owned: Mapping[Tensor, Tensor]
    ) -> None:
        """Add the owned part of a public group, and what the class fills in to the public one."""
        number, part = self.num_groups, self._shared_part()
        self._leaf_of.update(owned)
        if recipe is not None or part is None:
            self._add_part(recipe or self._default, [number], [_owned_part(group, owned)])
        else:
            given = options_of(group)
            owned_part = _owned_part(group, owned)
            leaves = _leaf_ids([owned_part])
            part.optimizer.add_param_group(owned_part)
            part.groups.append(number)
            part.given.append(given)
            _check_followed(part.recipe, part.optimizer, leaves, first=len(part.groups) - 1)
            part.traits = self._tried(part.recipe, part.given)
        for key, value in self._groups()[number].items():
            if key not in PARAM_KEYS:
                group.setdefault(key, value)

    def drop_groups(self, count: int) -> None:
        """Keep only the first ``count`` groups: another rank could not add the rest."""
        for part in self._parts:
            part.groups = [number for number in part.groups if number < count]
            del part.optimizer.param_groups[len(part.groups) :]
            del part.given[len(part.groups) :]
            leaves = {leaf for group in part.optimizer.param_groups for leaf in group["params"]}
            state: dict[Any, Any] = part.optimizer.state
            for key in [key for key in state if isinstance(key, Tensor) and key not in leaves]:
                del state[key]
        self._parts = [part for part in self._parts if part.groups]
        kept = {leaf for group in self._groups() for leaf in group["params"]}
        self._leaf_of = {param: leaf for param, leaf in self._leaf_of.items() if leaf in kept}

    def load(self, groups: list[ParamGroup], state: Mapping[Any, Any], *, exact: bool) -> None:
        """Replace the state, through the classes' own ``load_state_dict``.

        Args:
            groups: public groups with the options to go on with; gaps are filled in as the class
                fills in old state dicts.
            state: leaf -> state, with tensors that become the optimizer's own; other keys are
                global entries.
            exact: keep the dtypes of the state, where the class would cast it to its parameters'.
        """
        for part in self._parts:
            locals_ = part.optimizer.param_groups
            number = {leaf: n for n, leaf in enumerate(params_of(locals_))}
            packed_groups = [
                {"params": [number[leaf] for leaf in local["params"]], **options_of(groups[index])}
                for index, local in zip(part.groups, locals_, strict=True)
            ]
            packed = {number.get(key, key): value for key, value in state.items() if _concerns(key, number)}
            part.optimizer.load_state_dict({"state": packed, "param_groups": packed_groups})
            if exact:
                held: dict[Any, Any] = part.optimizer.state
                held.update({key: _as_saved(held[key], state[key]) for key in held if key in state})
        self._fill_in(groups)

    def check_dicts(self) -> None:
        """Refuse to speak for a class whose ``state_dict`` says more than its ``state`` holds.

        Raises:
            TypeError: a class, such as a wrapper around another optimizer, has a ``state_dict`` of its own.
        """
        for part in self._parts:
            if type(part.optimizer).state_dict is not Optimizer.state_dict:
                raise TypeError(
                    f"{part.recipe.name} has a state_dict() of its own, so what it keeps outside its `state` "
                    "would be lost: it can be trained sharded, but neither consolidated nor loaded"
                )

    def save(self) -> list[tuple[dict[Any, Any], list[ParamGroup]]]:
        """Take note of what `load` replaces, for `restore`; copies no tensor."""
        return [
            (part.optimizer.state, [dict(group) for group in part.optimizer.param_groups])
            for part in self._parts
        ]

    def restore(self, saved: list[tuple[dict[Any, Any], list[ParamGroup]]]) -> None:
        """Undo a `load` that failed here or on another rank."""
        for part, (state, groups) in zip(self._parts, saved, strict=True):
            part.optimizer.state = state  # type: ignore[assignment]
            part.optimizer.param_groups = groups

    def replace_state(self, state: dict[Any, Any]) -> None:
        """Take over a dict that the user put in the place of the only optimizer's state."""
        self._parts[0].optimizer.state = state  # type: ignore[assignment]

    def initial_state(self, groups: list[ParamGroup]) -> dict[Any, Any]:
        """Give the state optimizers over all of ``groups`` have before their first step.

        Most classes make none; where one does (Adagrad), it is allocated here for every parameter.
        """
        everything = {param: param for param in params_of(groups)}
        state: dict[Any, Any] = {}
        for part in self._parts:
            state.update(part.recipe.build([_owned_part(groups[n], everything) for n in part.groups]).state)
        return state

    def shaped_keys(self, group: int) -> ShapedKeys:
        """Tell which state entries of a public group's class have their parameter's shape."""
        return next(part.shaped for part in self._parts if group in part.groups)

    def _shared_part(self) -> _Part | None:
        return next((part for part in self._parts if part.recipe is self._default), None)

    def _groups(self) -> list[ParamGroup]:
        """The local groups in the order of the public ones."""
        numbered = [
            (number, group)
            for part in self._parts
            for number, group in zip(part.groups, part.optimizer.param_groups, strict=True)
        ]
        return [group for _, group in sorted(numbered, key=lambda pair: pair[0])]

    def _fill_in(self, groups: list[ParamGroup]) -> None:
        """Give public groups the options they lack and the local ones have."""
        for public, local in zip(groups, self._groups(), strict=True):
            for key, value in local.items():
                if key not in PARAM_KEYS:
                    public.setdefault(key, value)


def _as_saved(loaded: Any, saved: Any, name: object = None) -> Any:  # noqa: ANN401 - whatever the class keeps
    """Undo what loading did to dtypes and containers; the devices stay, and so does a step count."""
    if name == "step" or isinstance(loaded, Tensor) != isinstance(saved, Tensor):
        return loaded
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            saved[key] = _as_saved(loaded[key], saved[key], key)
        return saved
    if isinstance(saved, list | tuple) and len(saved) == len(loaded):
        return type(saved)(_as_saved(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


def _step_chosen(optimizer: Optimizer, chosen: Collection[int]) -> None:
    """Step only the leaves with some ids, the others out of their groups for as long as it takes."""
    members = [group["params"] for group in optimizer.param_groups]
    parts = [[leaf for leaf in leaves if id(leaf) in chosen] for leaves in members]
    if not any(parts):
        return
    try:
        for group, part in zip(optimizer.param_groups, parts, strict=True):
            group["params"] = part
        optimizer.step()
    finally:
        for group, leaves in zip(optimizer.param_groups, members, strict=True):
            group["params"] = leaves


def _leaf_ids(groups: list[ParamGroup]) -> list[set[int]]:
    return [{id(leaf) for leaf in group["params"]} for group in groups]


def _check_followed(spec: OptimizerSpec, optimizer: Optimizer, given: list[set[int]], first: int = 0) -> None:
    """Refuse a class whose groups hold other tensors than it was given: ours would take their place.

    Args:
        spec: what built the optimizer.
        optimizer: from its group ``first`` on, it was given some groups.
        given: the leaves of each of these, by identity.
        first: how many groups it had before.

    Raises:
        ValueError: it made groups of its own.
    """
    if _leaf_ids(optimizer.param_groups[first:]) != given:
        raise ValueError(
            f"expected {spec.name} to step the parameters that it is given, but it built groups over other "
            "tensors (copies in fp32, perhaps) or in another order of groups: sharded it would train another "
            "way. Use a class that keeps no copies, with master_dtype=torch.float32 for masters, or use it "
            "without sharding"
        )


def _concerns(key: object, leaves: Mapping[Tensor, int]) -> bool:
    return key in leaves if isinstance(key, Tensor) else True


def _owned_part(group: ParamGroup, owned: Mapping[Tensor, Tensor]) -> ParamGroup:
    return {"params": [owned[p] for p in group["params"] if p in owned], **options_of(group)}


def _set_options(target: ParamGroup, source: ParamGroup) -> None:
    """Give a group the options of another, and no others."""
    for key in [key for key in target if key not in PARAM_KEYS and key not in source]:
        del target[key]
    target.update(options_of(source))
