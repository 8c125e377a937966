"""The constructor's options and parameter groups, read and checked. Does not communicate."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.agreement import check_flags
from zero_optim.comm.traffic import Timeout
from zero_optim.dtensor.placement import Chunks
from zero_optim.health.watchdog import check_patience
from zero_optim.plan.costs import Cost, CostName, cost_named
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import Pieces
from zero_optim.probe.probe import why_dtypes_couple
from zero_optim.shard.store import Store
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.spec import CutRowsOf, GroupSpec, OptimizerSpec

KEPT_WHOLE = "cuts=False"  # why a parameter is not cut, if the user wants it so
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suggest the known name that is most like another, as the end of a sentence; empty without one."""
    return "".join(f": did you mean {near}?" for near in get_close_matches(name, list(known), 1, cutoff))


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """The arguments of `ZeroRedundancyOptimizer`, without parameters and class; unchecked."""

    parameters_as_bucket_view: bool
    overlap_with_ddp: bool
    assume_separable: bool
    cuts: bool
    bucket_cap_mb: float
    cost: CostName | Cost
    master_dtype: torch.dtype | None
    ema_decay: float | None
    timeout: Timeout = None
    on_stall: str = "raise"
    own_options: Sequence[str] = ()
    allow_unsaved: bool = False

    @property
    def _flags(self) -> dict[str, bool]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type is bool}

    def check_flags(self) -> None:
        """Refuse flags of wrong types, and wrong limits; other options are checked at their use."""
        check_flags(**self._flags)
        check_patience(self.timeout, self.on_stall)
        names = self.own_options
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"expected own_options to be names of options, such as ('lr',), got {names!r}")

    def check_arguments(self, spec: OptimizerSpec) -> None:
        """Raise TypeError for an argument that the class lacks, if an option has nearly its name."""
        try:
            known = signature(spec.optimizer_class).parameters
        except (TypeError, ValueError):  # of C
            return
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for name in [each for each in spec.arguments if each not in known and not takes_any]:
            if near := did_you_mean(name, [option.name for option in fields(self)], 0.75):
                raise TypeError(f"{spec.name} takes no argument '{name}'{near}")

    def check_rows(self) -> None:
        """Refuse options that parameters kept as rows do not support."""
        if self.overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp=True waits for a comm hook, and a fully sharded model takes none: leave it "
                "out"
            )

    def check_held(self, read_by: torch.nn.Module | None) -> None:
        """Refuse options for parameters that all ranks have whole, where others keep their rows."""
        wrong = {
            "overlap_with_ddp=True": self.overlap_with_ddp,
            "gather_lazily": read_by is not None,
            "ema_decay": self.ema_decay is not None,
        }
        for name in (name for name, is_given in wrong.items() if is_given):
            raise ValueError(
                f"{name} needs parameters that every rank has whole, and some are DTensors here: leave it out"
                + ("; torch.optim.swa_utils.AveragedModel averages DTensors" if name == "ema_decay" else "")
            )

    def describe(self) -> list[str]:
        """Describe the options for comparison by ranks; `Sharding` compares the capacity."""
        return [
            f"master_dtype={self.master_dtype}, ema_decay={self.ema_decay}, cost={describe(self.cost)}",
            ", ".join(f"{name}={value}" for name, value in self._flags.items()),
            f"timeout={self.timeout}, on_stall={self.on_stall}",
            f"own_options={sorted(self.own_options)}",
        ]


@dataclass(slots=True, eq=False)
class PlanInputs:
    """The inputs of plans, beside parameters and ranks; ``store`` keeps the parameters held as rows."""

    options: ShardingOptions
    store: Store
    held: dict[Tensor, Chunks] = field(default_factory=dict)  # DTensors, whose rows others keep
    costs: dict[Tensor, float] = field(default_factory=dict)


class GroupReader(Optimizer):
    """Reads parameter groups as ``torch.optim`` does, and checks them; the class fills in its defaults."""

    def __init__(self, params: Params) -> None:
        if isinstance(params, set | frozenset):
            raise TypeError("expected ordered parameters, got a set, whose order differs between ranks")
        super().__init__(params, {})

    @classmethod
    def behind(cls, groups: list[ParamGroup]) -> "GroupReader":
        """Return a reader that appends to groups."""
        reader = cls.__new__(cls)
        reader.param_groups, reader.defaults = groups, {}
        return reader

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Read a copy of a group, since our keys are removed from it."""
        super().add_param_group(copy(param_group))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Refuse."""
        # torch.optim wraps the step of every class of which it makes an object: it must not be Optimizer's.
        raise NotImplementedError("it only reads")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The library's own options of new groups, removed from them; one entry a group."""

    costs: list[Cost]
    specs: list[GroupSpec]
    default: OptimizerSpec  # of groups without a class of their own
    options: ShardingOptions

    @classmethod
    def taken_from(
        cls, groups: Sequence[ParamGroup], default: OptimizerSpec, options: ShardingOptions
    ) -> "GroupOptions":
        """Remove them from groups; raises if a value is of the wrong kind or out of range."""
        costs = [cost_named(group.pop("cost", options.cost)) for group in groups]
        may_cut = [group.pop("cuts", options.cuts) for group in groups]
        for cuts in may_cut:
            check_flags(cuts=cuts)
        specs = [OptimizerSpec.taken_from(group) or default for group in groups]
        given = map(GroupSpec, specs, map(options_of, groups), may_cut)
        return cls(costs, list(given), default, options)

    def describe(self) -> list[str]:
        """Describe them for comparison by ranks."""
        own = [each.spec for each in self.specs if each.spec is not self.default]
        return [*(f"optimizer {spec.describe()}" for spec in own), self.describe_cuts()]

    def describe_cuts(self) -> str:
        """Tell which groups may be cut."""
        return f"cuts of groups {[each.may_cut for each in self.specs]}"

    def check_dtypes(
        self, groups: Sequence[ParamGroup], stepped_dtype: Callable[[Tensor], torch.dtype]
    ) -> None:
        """Raise ValueError if a class joins parameters of the dtypes that a group has."""
        for each, group in zip(self.specs, groups, strict=True):
            spec, dtypes = each.spec, frozenset(map(stepped_dtype, group["params"]))
            if len(dtypes) < 2 or self.options.assume_separable:
                continue
            reason = why_dtypes_couple(spec.subject([each.options]), dtypes)
            if reason is not None:
                raise ValueError(
                    f"expected parameters of one dtype in each group, as {spec.name} gives other results "
                    f"when each rank steps only its own: {reason}. Give each dtype a group"
                )

    def local_over(self, groups: list[ParamGroup], leaf_of: dict[Tensor, Tensor]) -> LocalOptimizer:
        """Build the groups' classes over this rank's leaves."""
        is_untried, saves = self.options.assume_separable, not self.options.allow_unsaved
        return LocalOptimizer(self.default, groups, self.specs, leaf_of, is_untried, saves)

    def why_whole(
        self,
        before: Sequence[GroupSpec],
        groups: Sequence[ParamGroup],
        cut_rows: CutRowsOf,
        pieces: Sequence[Pieces],
    ) -> list[str | None]:
        """Return why each parameter cannot be cut as planned, or None; ``before``: earlier groups."""
        pieces_of, is_tried, reasons = iter(pieces), not self.options.assume_separable, list[str | None]()
        for own, group in zip(self.specs, groups, strict=True):
            cuts = [cut_rows(param, next(pieces_of)) for param in group["params"]]
            beside = [each.options for each in (*before, *self.specs) if each.spec is own.spec]
            tried = own.spec.why_not_cut(beside, own.options, cuts, is_tried=is_tried)
            reasons += tried if own.may_cut else [KEPT_WHOLE] * len(cuts)
        return reasons
