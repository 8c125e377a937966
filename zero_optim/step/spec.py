"""Optimizer classes and their arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import Pieces
from zero_optim.probe.cut_rows import CutRows, why_rows_not_cut
from zero_optim.probe.cut_rows import why_not_cut as why_class_not_cut
from zero_optim.probe.subject import OptimizerUnderTest, under_test

Closure: TypeAlias = Callable[[], float] | None
CutRowsOf: TypeAlias = Callable[[Tensor, Pieces], CutRows]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer class, or a callable that builds one from groups, and its keyword arguments."""

    optimizer_class: Callable[..., Optimizer]
    arguments: Mapping[str, Any]

    @classmethod
    def taken_from(cls, group: ParamGroup) -> "OptimizerSpec | None":
        """Pop ``optimizer_class`` from a group; None if it has none."""
        if "optimizer_class" not in group:
            return None
        optimizer_class = group.pop("optimizer_class")
        return cls(optimizer_class, options_of(group))

    @property
    def name(self) -> str:
        """The class's name, for messages."""
        return getattr(self.optimizer_class, "__qualname__", type(self.optimizer_class).__qualname__)

    def describe(self) -> str:
        """Describe the class and its arguments, to compare ranks; TypeError if not callable."""
        given: object = self.optimizer_class
        if not callable(given) or isinstance(given, Module):
            raise TypeError(
                "expected optimizer_class to be a class such as torch.optim.AdamW, or a function that builds "
                f"an optimizer from groups, got {_shown(self.optimizer_class)}"
            )
        options = sorted(f"{key}={describe(value)}" for key, value in self.arguments.items())
        return f"{describe(self.optimizer_class)} with {', '.join(options) or 'no options'}"

    def build(self, groups: list[ParamGroup]) -> Optimizer:
        """Build the optimizer; TypeError if the result is no ``torch.optim.Optimizer``."""
        optimizer = self.optimizer_class(groups, **self.arguments)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected optimizer_class to build a torch.optim.Optimizer, got {optimizer!r}")
        return optimizer

    def subject(self, groups: Sequence[ParamGroup]) -> OptimizerUnderTest:
        """Return the class with its arguments and the options of groups, for trials."""
        return under_test(self.optimizer_class, self.arguments, groups)

    def why_not_cut(
        self, groups: Sequence[ParamGroup], own: ParamGroup, cuts: Sequence[CutRows], *, is_tried: bool
    ) -> list[str | None]:
        """Return why each parameter of a group, with ``own`` options, cannot be cut, or None."""
        if not is_tried:
            return [f"{self.name}: not tried (assume_separable=True)"] * len(cuts)
        every, mine = self.subject(groups), self.subject([own])
        of_class = {dtype: why_class_not_cut(every, dtype) for dtype in {cut.dtype for cut in cuts}}
        reasons = {
            cut: of_class[cut.dtype] or (why_rows_not_cut(mine, cut) if cut.ends else None)
            for cut in dict.fromkeys(cuts)
        }
        return [f"{self.name}: {reasons[cut]}" if reasons[cut] else None for cut in cuts]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What one group gave: its spec, the same object for groups that share an optimizer, and options."""

    spec: OptimizerSpec
    options: ParamGroup
    may_cut: bool


def _shown(value: object) -> str:
    if isinstance(value, Optimizer):
        name = type(value).__name__
        return f"an optimizer, {name}: give the class, {name}, and its options by name"
    if isinstance(value, Module | ModuleType):
        return f"a module, {getattr(value, '__name__', type(value).__name__)}"
    return f"{type(value).__name__}: {value!r}"
