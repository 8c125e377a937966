"""Parameters, options and names of ``torch.optim`` groups."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from operator import is_
from typing import Any

from torch import Tensor

from zero_optim.plan.description import describe

ParamGroup = dict[str, Any]


# Keys that describe a group's parameters; all others are options.
PARAM_KEYS = frozenset({"params", "param_names"})
# Options that schedulers change or add.
_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})


def params_of(groups: Sequence[ParamGroup]) -> list[Tensor]:
    """List all parameters, group by group."""
    return [param for group in groups for param in group["params"]]


def have_members(groups: Sequence[ParamGroup], members: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether groups have these very parameters, in this order; every step asks."""
    for group, known in zip(groups, members, strict=False):
        params = group["params"]
        if len(params) != len(known) or not all(map(is_, params, known)):
            return False
    return len(groups) == len(members)


def options_of(group: ParamGroup) -> ParamGroup:
    """Copy a group's options without its parameters."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def with_options(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> list[ParamGroup]:
    """Combine the groups' own parameters and names with saved options."""
    return [
        {
            **{key: group[key] for key in ("params", "param_names") if key in group},
            **{key: deepcopy(value) for key, value in options.items() if key != "params"},
        }
        for group, options in zip(groups, saved, strict=True)
    ]


def changed_in_kind(before: ParamGroup, after: ParamGroup) -> list[str]:
    """Name options that became zero or nonzero (rates aside), or changed flag, name or type."""
    known = before.get
    changed = [  # every step calls this, and most values are the same objects
        key
        for key, value in after.items()
        if known(key) is not value
        and key not in PARAM_KEYS
        and kind_of(key, known(key)) != kind_of(key, value)
    ]
    gone = [key for key, value in before.items() if key not in after and kind_of(key, value) is not None]
    return changed + [key for key in gone if key not in PARAM_KEYS]


def kind_of(key: str, value: object) -> object:
    """Return whether a numeric option is zero, else its value or type; hashable."""
    if key in _RATES:
        return isinstance(value, Tensor)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value != 0
    if isinstance(value, list | tuple):
        return tuple(kind_of(key, part) for part in value)
    return type(value)


def param_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Name every parameter for messages: its own name, else group and place, with the shape."""
    names: list[str] = []
    for number, group in enumerate(groups):
        own = group.get("param_names")
        for place, param in enumerate(group["params"]):
            known = f"'{own[place]}'" if own else f"{place} of group {number}"
            names.append(f"parameter {known} (shape {tuple(param.shape)})")
    return names


def names_text(names: Sequence[str], most: int = 10) -> str:
    """List parameters in a message, only the first of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Name every parameter briefly: its own name, or group and place."""
    return [
        own[place] if (own := group.get("param_names")) else f"parameter {place} of group {number}"
        for number, group in enumerate(groups)
        for place in range(len(group["params"]))
    ]


def bucket_text(number: int, names: Sequence[str]) -> str:
    """Name a bucket in messages: ``bucket 3 (layers.7.weight, …)``."""
    return f"bucket {number} ({names[0]}{', …' if len(names) > 1 else ''})"


def describe_options(groups: Sequence[ParamGroup]) -> list[str]:
    """Describe each group's options for ranks to compare."""
    described = []
    for number, group in enumerate(groups):
        options = [f"{key}={describe(value)}" for key, value in group.items() if key not in PARAM_KEYS]
        described.append(f"group {number} with {', '.join(sorted(options)) or 'no options'}")
    return described
