"""One optimizer of the user's class over leaves of this rank, as it was built from its spec."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import ParamGroup, changed_in_kind, kind_of, options_of, params_of
from zero_optim.plan.options import Plain, are_close, plain
from zero_optim.probe.probe import probe
from zero_optim.probe.rows import CutRows
from zero_optim.probe.shaped import ShapedKeys
from zero_optim.probe.traits import Traits, refusal
from zero_optim.step.spec import OptimizerSpec


class BuiltOptimizer:
    """One optimizer and the public groups it steps; its own groups are in their order.

    Args:
        spec: how it is built.
        numbers: indices of the public groups.
        groups: what this rank owns of each.
        is_tried: whether to try what sharding does to the class.
        steps_parts: whether it will be stepped some parameters at a time.

    Attributes:
        spec: as given.
        numbers: indices of the public groups, those added later too.
        optimizer: the optimizer.
        shaped: which of its state entries have their parameter's shape.
        traits: what was found of the class; None where it was not tried.
        given: the options of its groups as they were given.

    Raises:
        TypeError: the spec does not build a ``torch.optim.Optimizer``.
        ValueError: sharding would change what the class does.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        numbers: list[int],
        groups: list[ParamGroup],
        *,
        is_tried: bool,
        steps_parts: bool,
    ) -> None:
        self.spec = spec
        self.numbers = numbers
        self.shaped = ShapedKeys(spec.optimizer_class, dict(spec.arguments))
        self._is_tried = is_tried
        self._sparse: dict[object, str | None] = {}  # what was found for kinds of options
        self._asked: dict[object, str | None] = {}  # why options of a kind allow no cuts
        self.given = [options_of(group) for group in groups]  # as given: the class will fill in its own
        leaves = _leaf_ids(groups)  # taken now: the class may change the dicts it is given
        self.optimizer = spec.build(groups)  # before anything is tried, so that wrong options are told first
        self._defaults = {key: plain(value) for key, value in self.optimizer.defaults.items()}
        self._check_followed(leaves)
        self.traits = self._found(steps_parts=steps_parts)

    def _found(self, *, steps_parts: bool) -> Traits | None:
        """Find out what the class tolerates, and refuse it if sharding would change it.

        Raises:
            ValueError: it would, or the overlap would, and nobody said that they know better.
        """
        if not self._is_tried:
            return None
        traits = probe(self.spec.optimizer_class, self.spec.arguments, self.given)
        if not traits.separable:
            raise ValueError(refusal(self.spec.optimizer_class, traits))
        if steps_parts:
            self.spec.check_parts(traits)
        return traits

    def _check_followed(self, given: list[set[int]]) -> None:
        """Refuse a class whose groups hold other tensors than it was given: ours would take their place.

        Args:
            given: the leaves of each of the last groups, by identity.

        Raises:
            ValueError: it made groups of its own.
        """
        first = len(self.numbers) - len(given)
        if _leaf_ids(self.optimizer.param_groups[first:]) != given:
            raise ValueError(
                f"expected {self.spec.name} to step the parameters that it is given, but it built groups "
                "over other tensors (copies in fp32, perhaps) or in another order of groups: sharded it "
                "would train another way. Use a class that keeps no copies, with master_dtype=torch.float32 "
                "for masters, or use it without sharding"
            )

    def is_default(self, key: str, value: Plain) -> bool:
        """Whether an option has the default that the class was built with, or had none."""
        return key not in self._defaults or are_close(self._defaults[key], value)

    def check_parts(self) -> None:
        """Refuse a class whose step cannot be taken some parameters at a time; see `OptimizerSpec`."""
        self.spec.check_parts(self.traits)

    def why_not_cut(self, own: ParamGroup, cuts: Sequence[CutRows], *more: ParamGroup) -> list[str | None]:
        """Tell why ranks cannot share the rows of parameters of a group that it steps; see `OptimizerSpec`.

        Args:
            own: the options of the group.
            cuts: of each parameter, see `Leaves.cut_rows`.
            more: options of groups that may be added.
        """
        return self.spec.why_not_cut([*self.given, *more], own, cuts, is_tried=self._is_tried)

    def why_not_sparse_rows(self, options: ParamGroup, dtype: torch.dtype) -> str | None:
        """Tell why it cannot step rows of a parameter with rows of sparse gradients; None if it can.

        Asked in steps, so it is tried again only where another kind of options may be another algorithm:
        momentum that is switched on, not a rate that a scheduler changes.

        Args:
            options: of the parameter's group, as they are now.
            dtype: see `Leaves.tried_dtype`.
        """
        if not self._is_tried:
            return "it was not tried (assume_separable=True)"
        kind = dtype, frozenset((key, kind_of(key, value)) for key, value in options.items())
        if kind not in self._sparse:
            self._sparse[kind] = self.spec.why_not_sparse_rows(options, dtype)
        return self._sparse[kind]

    def check_cuts(self, groups: list[ParamGroup], cuts_of: Callable[[ParamGroup], list[CutRows]]) -> None:
        """Refuse options of public groups with which the class does not bear that parameters are cut.

        Options are compared with those of the last step, which the groups here still have. Only where they
        differ in kind, the class is tried again, once for each kind.

        Args:
            groups: all public groups.
            cuts_of: lists where the parameters of a group are cut.

        Raises:
            ValueError: there are such options; says what to do.
        """
        for number, own in zip(self.numbers, self.optimizer.param_groups, strict=True):
            group = groups[number]
            changed = changed_in_kind(own, group)
            if not changed:
                continue
            reason = self._why_not_cut_now(options_of(group), cuts_of(group))
            if reason is not None:
                given = ", ".join(f"{key}={group.get(key)!r}" for key in changed)
                raise ValueError(
                    f"parameters of group {number} are cut, as the options allowed it when the optimizer was "
                    f"built; expected options that still do, got {given}, which do not ({reason}). Build the "
                    "optimizer with these options, or with cuts=False"
                )

    def _why_not_cut_now(self, options: ParamGroup, cuts: list[CutRows]) -> str | None:
        kinds = frozenset((key, kind_of(key, value)) for key, value in options.items()), tuple(cuts)
        if kinds not in self._asked:
            reasons = self.spec.why_not_cut([options], options, cuts, is_tried=self._is_tried)
            self._asked[kinds] = next((reason for reason in reasons if reason is not None), None)
        return self._asked[kinds]

    def add_group(self, number: int, group: ParamGroup, *, steps_parts: bool) -> None:
        """Add what this rank owns of a public group.

        Args:
            number: index of the public group.
            group: what this rank owns of it.
            steps_parts: whether it will be stepped some parameters at a time.

        Raises:
            Exception: what the class raises. The group may have been added then: `drop_groups` takes it off.
        """
        given, leaves = options_of(group), _leaf_ids([group])
        self.optimizer.add_param_group(group)
        self.numbers.append(number)
        self.given.append(given)
        self._check_followed(leaves)
        self.traits = self._found(steps_parts=steps_parts)

    def drop_groups(self, count: int) -> None:
        """Keep only what it steps of the first ``count`` public groups."""
        self.numbers = [number for number in self.numbers if number < count]
        del self.optimizer.param_groups[len(self.numbers) :]
        del self.given[len(self.numbers) :]
        leaves = {leaf for group in self.optimizer.param_groups for leaf in group["params"]}
        state: dict[Any, Any] = self.optimizer.state
        for key in [key for key in state if isinstance(key, Tensor) and key not in leaves]:
            del state[key]

    def step_some(self, chosen: Collection[int], **kwargs: object) -> None:
        """Step only the leaves with some ids, the others out of their groups for as long as it takes.

        Args:
            chosen: the ids.
            **kwargs: for the class's own ``step``.
        """
        groups = self.optimizer.param_groups
        members = [group["params"] for group in groups]
        stepped = [[leaf for leaf in leaves if id(leaf) in chosen] for leaves in members]
        if not any(stepped):
            return
        try:
            for group, leaves in zip(groups, stepped, strict=True):
                group["params"] = leaves
            step: Callable[..., object] = self.optimizer.step
            step(**kwargs)
        finally:
            for group, leaves in zip(groups, members, strict=True):
                group["params"] = leaves

    def load(self, groups: list[ParamGroup], state: Mapping[Any, Any], *, exact: bool) -> None:
        """Replace the state, through the class's own ``load_state_dict``; see `LocalOptimizer.load`."""
        own_groups = self.optimizer.param_groups
        place = {leaf: index for index, leaf in enumerate(params_of(own_groups))}
        packed_groups = [
            {"params": [place[leaf] for leaf in group["params"]], **options_of(groups[number])}
            for number, group in zip(self.numbers, own_groups, strict=True)
        ]
        keys = [key for key in state if key in place or not isinstance(key, Tensor)]
        packed = {place.get(key, key): state[key] for key in keys}
        self.optimizer.load_state_dict({"state": packed, "param_groups": packed_groups})
        if exact:
            held: dict[Any, Any] = self.optimizer.state
            held.update({key: _as_saved(held[key], state[key]) for key in held if key in state})

    def check_dict(self) -> None:
        """Refuse to speak for a class whose ``state_dict`` says more than its ``state`` holds.

        Raises:
            TypeError: the class, such as a wrapper around another optimizer, has a ``state_dict`` of its own.
        """
        if type(self.optimizer).state_dict is not Optimizer.state_dict:
            raise TypeError(
                f"{self.spec.name} has a state_dict() of its own, so what it keeps outside its `state` "
                "would be lost: it can be trained sharded, but neither consolidated nor loaded"
            )


def _leaf_ids(groups: list[ParamGroup]) -> list[set[int]]:
    return [{id(leaf) for leaf in group["params"]} for group in groups]


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
