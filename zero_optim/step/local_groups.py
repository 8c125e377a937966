"""The groups of the local optimizers, which follow the public ones. Nothing here communicates.

The public ``param_groups``, with every parameter, are the one truth for options. The local groups
hold only this rank's leaves; their options are overwritten from the public ones before each step
and read back after it, so that schedulers act on the former and classes that count in their groups
(schedule-free ones do) act on the latter.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from zero_optim.plan.groups import PARAM_KEYS, ParamGroup, member_ids, options_of
from zero_optim.plan.options import OptionKey, are_close, changeable

LocalOnes = Callable[[], list[ParamGroup]]


class FollowedGroups:
    """Has local groups follow the public ones, which the user may change between steps.

    Args:
        leaf_of: this rank's parameters, each with the leaf that is stepped for it.

    Attributes:
        written: the options that classes have changed in steps.
    """

    def __init__(self, leaf_of: Mapping[Tensor, Tensor]) -> None:
        self.written: set[OptionKey] = set()
        self._leaf_of = dict(leaf_of)
        self._members: list[list[int]] = []  # those of the public groups that the local ones follow

    def add(self, leaf_of: Mapping[Tensor, Tensor]) -> None:
        """Know more parameters, each with the leaf that is stepped for it."""
        self._leaf_of.update(leaf_of)

    def keep(self, leaves: Collection[Tensor]) -> None:
        """Forget all parameters but those of some leaves."""
        self._leaf_of = {param: leaf for param, leaf in self._leaf_of.items() if leaf in leaves}

    def part_of(self, public: ParamGroup) -> ParamGroup:
        """Make the local group of a public one."""
        return group_of_leaves(public, self._leaf_of)

    @contextmanager
    def following(self, groups: list[ParamGroup], local_ones: LocalOnes) -> Iterator[None]:
        """Give the local groups options and members of the public ones, and these what the class changed.

        Args:
            groups: the public groups.
            local_ones: gives the local groups, in the same order.
        """
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
        """Give the local groups the leaves of what the public ones hold by now."""
        members = member_ids(groups)
        if members != self._members:
            for public, local in zip(groups, local_ones(), strict=True):
                local["params"] = [self._leaf_of[p] for p in public["params"] if p in self._leaf_of]
            self._members = members


def group_of_leaves(group: ParamGroup, leaf_of: Mapping[Tensor, Tensor]) -> ParamGroup:
    """Make a group with the options of a public one and the leaves of its parameters that have some."""
    return {"params": [leaf_of[p] for p in group["params"] if p in leaf_of], **options_of(group)}


def fill_in(public: ParamGroup, local: ParamGroup) -> None:
    """Give a public group the options that it lacks and the local one has."""
    for key, value in local.items():
        if key not in PARAM_KEYS:
            public.setdefault(key, value)


def _set_options(target: ParamGroup, source: ParamGroup) -> None:
    """Give a group the options of another, and no others."""
    for key in [key for key in target if key not in PARAM_KEYS and key not in source]:
        del target[key]
    target.update(options_of(source))
