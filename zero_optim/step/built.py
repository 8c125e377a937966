"""One optimizer of the user's class over this rank's leaves."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.compat import private
from zero_optim.plan.groups import PARAM_KEYS, ParamGroup, changed_in_kind, kind_of, options_of, params_of
from zero_optim.plan.option_values import OptionKey, Plain, are_close, changeable, plain
from zero_optim.plan.pieces import Pieces
from zero_optim.probe.probe import probe, state_entries
from zero_optim.probe.saved import BESIDE, has_own_dict, load_packed
from zero_optim.probe.traits import Traits, refusal, refusal_in_half
from zero_optim.step.spec import CutRowsOf, GroupSpec

_ABSENT = object()


class BuiltOptimizer:
    """One ``torch.optim.Optimizer`` built from a spec over leaves, for some of the public groups.

    ``given``: what each of these groups gave, by its number; the optimizer's groups have that order.
    ``written``: options that the class changed in steps.
    """

    def __init__(self, given: dict[int, GroupSpec], groups: list[ParamGroup], *, is_tried: bool) -> None:
        self.given = given
        self.spec = next(iter(given.values())).spec
        self.traits: Traits | None = None  # none if the class is not tried
        self.written: set[OptionKey] = set()
        self._members: list[list[Tensor]] = []  # of groups, whose places are known
        self._places: dict[Tensor, tuple[int, int]] = {}  # of leaves: number of the group, place in it
        self._answers: dict[object, Any] = {}  # of probes that steps and loads ask again
        leaves = _leaf_ids(groups)  # taken now: the class may change the dicts
        self.optimizer = self.spec.build(groups)  # first, so that wrong options are told before trials
        self.defaults = {key: plain(value) for key, value in self.optimizer.defaults.items()}
        self._try_class(leaves, is_tried=is_tried)

    def _try_class(self, leaves: list[set[int]], *, is_tried: bool) -> None:
        """Set ``traits``; raise ValueError if the class cannot step ``leaves``, those of the last groups."""
        first = len(self.given) - len(leaves)
        if _leaf_ids(self.optimizer.param_groups[first:]) != leaves:
            raise ValueError(
                f"expected {self.spec.name} to step the parameters that it is given, but it built groups "
                "over other tensors (copies in fp32, perhaps) or in another order of groups: sharded it "
                "would train another way. Use a class that keeps no copies, with master_dtype=torch.float32 "
                "for masters, or use it without sharding"
            )
        if is_tried:
            traits = probe(self.spec.subject([each.options for each in self.given.values()]))
            if not traits.separable:
                raise ValueError(refusal(self.spec.optimizer_class, traits))
            self.traits = traits
            leaves_now = params_of(self.optimizer.param_groups)
            narrow = any(leaf.is_floating_point() and leaf.element_size() < 4 for leaf in leaves_now)
            if traits.in_half is not None and narrow:
                raise ValueError(refusal_in_half(self.spec.optimizer_class, traits))

    def check_saved(self) -> None:
        """Raise TypeError if the state cannot be saved and resumed."""
        is_own = has_own_dict(self.optimizer)
        untried = "it was not tried (assume_separable=True)" if is_own else None
        reason = untried if self.traits is None else self.traits.unsaved
        if reason is not None:
            what = "has a state_dict() of its own, and its" if is_own else "keeps what its"
            raise TypeError(
                f"{self.spec.name} {what} state can be neither consolidated, saved nor loaded: {reason}"
            )

    def combine(self, answers: Iterator[bool]) -> None:
        """Keep the probe results that hold on every rank, from the ``answers`` of all classes."""
        if self.traits is not None:
            self.traits = self.traits.combined([next(answers) for _ in self.traits.answers()])

    def check_parts(self) -> None:
        """Raise ValueError if probed traits forbid steps of some parameters at a time."""
        if self.traits is not None and not self.traits.steppable_in_parts:
            raise ValueError(
                f"{self.spec.name} cannot be stepped during the backward pass, some parameters at a time: "
                f"{self.traits.counting}. Use it without zero_step (overlap_with_ddp)"
            )

    def state_entries(self, num_dims: int) -> dict[str, bool]:
        """Return whether each state entry of such parameters has their shape, as a probe shows."""
        if num_dims not in self._answers:
            subject = self.spec.subject([each.options for each in self.given.values()])
            self._answers[num_dims] = state_entries(subject, num_dims)
        entries: dict[str, bool] = self._answers[num_dims]
        return entries

    def check_cuts(
        self, groups: list[ParamGroup], cut_rows: CutRowsOf, pieces: Mapping[Tensor, Pieces]
    ) -> None:
        """Raise ValueError if options that changed in kind since the last step allow no cuts."""
        for number, own in zip(self.given, self.optimizer.param_groups, strict=True):
            group = groups[number]
            changed = changed_in_kind(own, group)
            if not changed:
                continue
            options, params = options_of(group), group["params"]
            cuts = [cut_rows(param, pieces[param]) for param in params if len(pieces[param]) > 1]
            key = frozenset((key, kind_of(key, value)) for key, value in options.items()), tuple(cuts)
            if key not in self._answers:
                is_tried = self.traits is not None
                self._answers[key] = self.spec.why_not_cut([options], options, cuts, is_tried=is_tried)
            reason = next((reason for reason in self._answers[key] if reason is not None), None)
            if reason is not None:
                now = ", ".join(f"{key}={group.get(key)!r}" for key in changed)
                raise ValueError(
                    f"several ranks own rows of parameters of group {number}, which the options allowed when "
                    f"the optimizer was built; {now} does not allow it ({reason}). Build the optimizer with "
                    "these options, or with cuts=False"
                )

    def add_group(self, number: int, given: GroupSpec, group: ParamGroup) -> None:
        """Add the owned part of a public group; after an error call `drop_groups`."""
        leaves = _leaf_ids([group])
        self.optimizer.add_param_group(group)
        self.given[number] = given
        self._try_class(leaves, is_tried=self.traits is not None)

    def drop_groups(self, count: int) -> None:
        """Drop all groups after the first ``count`` public ones."""
        self.given = {number: given for number, given in self.given.items() if number < count}
        del self.optimizer.param_groups[len(self.given) :]
        leaves = {leaf for group in self.optimizer.param_groups for leaf in group["params"]}
        state: dict[Any, Any] = self.optimizer.state
        for key in [key for key in state if isinstance(key, Tensor) and key not in leaves]:
            del state[key]

    # ------------------------------------------------------------------ the options of the public groups

    def take_options(self, groups: Sequence[ParamGroup]) -> list[dict[str, Plain]]:
        """Give the class the options of its public groups; return what a call may change in place."""
        for number, own in zip(self.given, self.optimizer.param_groups, strict=True):
            _set_options(own, groups[number])
        return list(map(changeable, self.optimizer.param_groups))

    def write_options(self, groups: Sequence[ParamGroup], before: Sequence[dict[str, Plain]]) -> None:
        """Give its public groups the options that the class has now, behind the call."""
        for number, own, earlier in zip(self.given, self.optimizer.param_groups, before, strict=True):
            changed = _set_options(groups[number], own)
            if earlier:
                now = changeable(own)
                changed += [key for key, was in earlier.items() if not are_close(was, now.get(key))]
            if changed:
                self.written.update((number, str(key)) for key in changed)

    def defaults_in(self, options: Sequence[Mapping[str, Plain]]) -> list[OptionKey]:
        """List the options of all groups, as plain values, that nobody set and that have the default."""
        return [
            (number, key)
            for number, given in self.given.items()
            if number < len(options)  # the user may have deleted a group
            for key, value in options[number].items()
            if key not in given.options and are_close(self.defaults.get(key, value), value)
        ]

    def step(self, chosen: Collection[Tensor] | None, /, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Step all leaves, or the chosen ones, with this optimizer's hooks alone.

        Those for all optimizers run around the sharded step.
        """
        if chosen is not None:
            return self._step_chosen(chosen, *args, **kwargs)
        method: Callable[..., Any] = self.optimizer.step
        is_hooked = private.global_optimizer_pre_hooks or private.global_optimizer_post_hooks
        function: Any = getattr(method, "__func__", None)
        is_pytorchs = getattr(function, "__globals__", {}).get("__name__") == Optimizer.__module__
        if not (is_hooked and is_pytorchs and getattr(function, "hooked", False)):
            return method(*args, **kwargs)
        arguments: tuple[Any, Any] = ((self.optimizer, *args), kwargs)
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            arguments = hook(self.optimizer, *arguments) or arguments
        result = function.__wrapped__(*arguments[0], **arguments[1])
        for done_hook in self.optimizer._optimizer_step_post_hooks.values():
            done_hook(self.optimizer, *arguments)
        return result

    def _step_chosen(self, chosen: Collection[Tensor], /, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Step some leaves: the groups omit the others meanwhile."""
        groups = self.optimizer.param_groups
        members = [group["params"] for group in groups]
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            self._members = members
            self._places = {
                leaf: (number, place)
                for number, leaves in enumerate(members)
                for place, leaf in enumerate(leaves)
            }
        stepped: list[list[Tensor]] = [[] for _ in members]
        for number, place in sorted(self._places[leaf] for leaf in chosen if leaf in self._places):
            stepped[number].append(members[number][place])
        if not any(stepped):
            return None
        try:
            for group, leaves in zip(groups, stepped, strict=True):
                group["params"] = leaves
            return self.step(None, *args, **kwargs)
        finally:
            for group, leaves in zip(groups, members, strict=True):
                group["params"] = leaves

    def load(self, groups: list[ParamGroup], state: Mapping[Any, Any], *, exact: bool) -> None:
        """Replace the state through the class's ``load_state_dict``, as `LocalStates.load`."""
        leaves = set(params_of(self.optimizer.param_groups))
        keys = [key for key in state if key in leaves or not isinstance(key, Tensor)]
        own, public = {key: state[key] for key in keys if key != BESIDE}, [groups[n] for n in self.given]
        load_packed(self.optimizer, own, public, state.get(BESIDE, {}))
        if exact:
            held: dict[Any, Any] = self.optimizer.state
            held.update({key: _as_saved(held[key], state[key]) for key in held if key in state})


def _leaf_ids(groups: list[ParamGroup]) -> list[set[int]]:
    return [{id(leaf) for leaf in group["params"]} for group in groups]


def _set_options(target: ParamGroup, source: ParamGroup) -> list[str]:
    changed = list[str]()
    for key, value in source.items():
        if target.get(key, _ABSENT) is not value and key not in PARAM_KEYS:
            target[key] = value
            changed.append(key)
    if not target.keys() <= source.keys():
        for key in target.keys() - source.keys() - PARAM_KEYS:
            del target[key]
    return changed


def _as_saved(loaded: Any, saved: Any, name: object = None) -> Any:  # noqa: ANN401 - whatever the class keeps
    """Restore dtypes and containers that loading changed, but not devices or step counts."""
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
