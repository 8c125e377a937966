"""The groups of the local optimizers, which follow the public ``param_groups``. No communication.

The public groups have all parameters and hold the true options. Each step copies them to the local groups,
and back afterwards: schedulers write to the public ones, schedule-free classes to their own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from zero_optim.plan.groups import PARAM_KEYS, ParamGroup, member_ids, options_of
from zero_optim.plan.options import OptionKey, are_close, changeable

LocalOnes = Callable[[], list[ParamGroup]]


class FollowedGroups:
    """Synchronizes local groups with the public ones, which users may change between steps.

    ``leaf_of``: parameter -> leaf. ``written``: the options that classes changed in steps.
    """

    def __init__(self, leaf_of: Mapping[Tensor, Tensor]) -> None:
        self.written: set[OptionKey] = set()
        self._leaf_of = dict(leaf_of)
        self._members: list[list[int]] = []  # those of the public groups that the local ones follow

    def add(self, leaf_of: Mapping[Tensor, Tensor]) -> None:
        """Add parameters and their leaves."""
        self._leaf_of.update(leaf_of)

    def keep(self, leaves: Collection[Tensor]) -> None:
        """Forget all parameters but those of some leaves."""
        self._leaf_of = {param: leaf for param, leaf in self._leaf_of.items() if leaf in leaves}

    def part_of(self, public: ParamGroup) -> ParamGroup:
        """Build the local group of a public one."""
        return group_of_leaves(public, self._leaf_of)

    @contextmanager
    def following(self, groups: list[ParamGroup], local_ones: LocalOnes) -> Iterator[None]:
        """Copy options and members to local groups, run the body, and copy the class's changes back."""
        for public, local in zip(groups, local_ones(), strict=True):
            _set_options(local, public)
        self._follow_members(groups, local_ones)
        before = list(map(changeable, local_ones()))
        yield
        for number, (public, local) in enumerate(zip(groups, local_ones(), strict=True)):
            known = public.get
            for key, value in local.items():
                if known(key) is not value and key not in PARAM_KEYS:
                    self.written.add((number, str(key)))
            if before[number]:
                now = changeable(local)
                changed = [key for key, was in before[number].items() if not are_close(was, now.get(key))]
                self.written.update((number, str(key)) for key in changed)
            _set_options(public, local)

    def _follow_members(self, groups: list[ParamGroup], local_ones: LocalOnes) -> None:
        members = member_ids(groups)
        if members != self._members:
            for public, local in zip(groups, local_ones(), strict=True):
                local["params"] = [self._leaf_of[p] for p in public["params"] if p in self._leaf_of]
            self._members = members


def group_of_leaves(group: ParamGroup, leaf_of: Mapping[Tensor, Tensor]) -> ParamGroup:
    """Build a group from a public one's options and the leaves of its parameters."""
    return {"params": [leaf_of[p] for p in group["params"] if p in leaf_of], **options_of(group)}


def fill_in(public: ParamGroup, local: ParamGroup) -> None:
    """Add options that the local group has and the public one lacks."""
    for key, value in local.items():
        if key not in PARAM_KEYS:
            public.setdefault(key, value)


def _set_options(target: ParamGroup, source: ParamGroup) -> None:
    for key in [key for key in target if key not in PARAM_KEYS and key not in source]:
        del target[key]
    target.update(options_of(source))
