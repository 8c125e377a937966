"""The local optimizer: the user's class over the leaves this rank owns.

The public ``param_groups``, with every parameter, are the one truth for options. The local
optimizer's own groups hold only this rank's leaves; their options are overwritten from the public
ones before each step and read back after it, so that schedulers act on the former and classes that
count in their groups (schedule-free ones do) act on the latter.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.traits import ShapedKeys

Group = dict[str, Any]

# Keys of a group that describe its parameters: never copied between public and local groups.
PARAM_KEYS = frozenset({"params", "param_names"})


class LocalOptimizer:
    """The user's optimizer over one rank's leaves. Does not communicate.

    Args:
        optimizer_class: a class of optimizers, or a callable that builds one from groups.
        groups: the public groups; options the class fills in are added to them.
        owned: the parameters this rank owns.
        defaults: keyword arguments for ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` did not give a ``torch.optim.Optimizer``.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: list[Group],
        owned: Collection[Tensor],
        defaults: dict[str, Any],
    ) -> None:
        """Build the optimizer; a group keeps its place even where this rank owns none of it."""
        self._optimizer_class = optimizer_class
        self._defaults = defaults
        self.shaped = ShapedKeys(optimizer_class, defaults)
        self.optimizer = optimizer_class([_owned_part(group, owned) for group in groups], **defaults)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"expected optimizer_class to build a torch.optim.Optimizer, got {self.optimizer!r}"
            )
        self._fill_in(groups)

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the leaves owned here, and the class's global entries if any."""
        return self.optimizer.state

    @property
    def leaves(self) -> list[Tensor]:
        """What the optimizer steps, group by group."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def initial_state(self, groups: list[Group]) -> dict[Any, Any]:
        """Give the state an optimizer over all of ``groups`` has before its first step.

        Most classes make none; where one does (Adagrad), it is allocated here for every parameter.
        """
        everything = {param for group in groups for param in group["params"]}
        return self._optimizer_class(
            [_owned_part(group, everything) for group in groups], **self._defaults
        ).state

    def step(self, groups: list[Group], closure: Callable[[], float] | None) -> float | None:
        """Step every leaf under the options of the public groups.

        Returns:
            What the class's ``step`` returns, None unless there is a closure.
        """
        for public, local in zip(groups, self.optimizer.param_groups, strict=True):
            _copy_options(public, local)
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        for public, local in zip(groups, self.optimizer.param_groups, strict=True):
            _copy_options(local, public)
        return loss

    def add_group(self, group: Group, owned: Collection[Tensor]) -> None:
        """Add the owned part of a public group, and what the class fills in to the public one."""
        self.optimizer.add_param_group(_owned_part(group, owned))
        self._fill_in([group], len(self.optimizer.param_groups) - 1)

    def drop_groups(self, count: int) -> None:
        """Keep only the first ``count`` groups: another rank could not add the rest."""
        for leaf in [p for group in self.optimizer.param_groups[count:] for p in group["params"]]:
            self.optimizer.state.pop(leaf, None)
        del self.optimizer.param_groups[count:]

    def load(self, groups: list[Group], state: dict[Any, Any]) -> None:
        """Replace the state, through the class's own ``load_state_dict``.

        Args:
            groups: public groups with the options to go on with; gaps are filled in as the class
                fills in old state dicts.
            state: leaf -> state, with tensors that become the optimizer's own; other keys are
                global entries.
        """
        number = {leaf: index for index, leaf in enumerate(self.leaves)}
        packed_groups: list[Group] = []
        for public, local in zip(groups, self.optimizer.param_groups, strict=True):
            packed: Group = {"params": [number[leaf] for leaf in local["params"]]}
            _copy_options(public, packed)
            packed_groups.append(packed)
        packed_state = {
            number[key] if isinstance(key, Tensor) else key: value for key, value in state.items()
        }
        self.optimizer.load_state_dict({"state": packed_state, "param_groups": packed_groups})
        self._fill_in(groups)

    def _fill_in(self, groups: list[Group], first: int = 0) -> None:
        """Give public groups the options they lack and the local ones have."""
        for public, local in zip(groups, self.optimizer.param_groups[first:], strict=True):
            for key, value in local.items():
                if key not in PARAM_KEYS:
                    public.setdefault(key, value)


def _owned_part(group: Group, owned: Collection[Tensor]) -> Group:
    part: Group = {"params": [p for p in group["params"] if p in owned]}
    _copy_options(group, part)
    return part


def _copy_options(source: Group, target: Group) -> None:
    for key, value in source.items():
        if key not in PARAM_KEYS:
            target[key] = value
