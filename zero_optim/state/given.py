"""What an optimizer is given: options and parameter groups, read and checked. Does not communicate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.agreement import check_flags
from zero_optim.health.watchdog import check_patience
from zero_optim.plan.costs import Cost, CostName, cost_named
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces
from zero_optim.probe.rows import CutRows
from zero_optim.step.spec import OptimizerSpec, why_not_cut

KEPT_WHOLE = "cuts=False"  # why a parameter is not cut, if the user wants it so
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """The options of a constructor on this rank, without parameters and class. Not checked yet.

    The attributes are arguments of `ZeroRedundancyOptimizer`; see there.
    """

    parameters_as_bucket_view: bool
    overlap_with_ddp: bool
    assume_separable: bool
    cuts: bool
    bucket_cap_mb: float
    cost: CostName | Cost
    master_dtype: torch.dtype | None
    ema_decay: float | None
    timeout: float | None = None
    on_stall: str = "raise"
    own_options: Sequence[str] = ()
    mirror: bool = False

    @property
    def _flags(self) -> dict[str, bool]:
        return {
            "parameters_as_bucket_view": self.parameters_as_bucket_view,
            "overlap_with_ddp": self.overlap_with_ddp,
            "assume_separable": self.assume_separable,
            "cuts": self.cuts,
            "mirror": self.mirror,
        }

    def check_flags(self) -> None:
        """Refuse flags of the wrong type, and wrong limits. Other options are checked where they are used.

        Raises:
            TypeError: with the name of the first flag.
            ValueError: see `check_patience`.
        """
        check_flags(**self._flags)
        check_patience(self.timeout, self.on_stall)
        names = self.own_options
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"expected own_options to be names of options, such as ('lr',), got {names!r}")

    def check_units(self) -> None:
        """Refuse options with which parameters cannot be those of a fully sharded model.

        Raises:
            ValueError: says which.
        """
        if self.mirror:
            raise ValueError(
                "the optimizer of a fully sharded model cannot be bound anew, so mirror=True would have no "
                "effect: leave it out, and save checkpoints"
            )
        if self.overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp=True waits for a comm hook, and a fully sharded model takes none: leave it "
                "out"
            )

    def describe(self) -> list[str]:
        """Describe the options, so that ranks can compare them; `Sharding` compares the capacity."""
        cost = describe(self.cost)
        return [
            f"master_dtype={self.master_dtype}, ema_decay={self.ema_decay}, cost={cost}",
            ", ".join(f"{name}={value}" for name, value in self._flags.items()),
            f"timeout={self.timeout}, on_stall={self.on_stall}",
            f"own_options={sorted(self.own_options)}",
        ]


class GroupReader(Optimizer):
    """Reads parameter groups as ``torch.optim`` does, and checks them.

    It has no defaults: the user's class fills in its own, so that groups are as without sharding.

    Raises:
        ValueError: there is no parameter, or one is there twice; or another error of ``torch.optim``.
        TypeError: an object is not a parameter, or their order differs between ranks.
    """

    def __init__(self, params: Params) -> None:
        if isinstance(params, set | frozenset):
            raise TypeError("expected ordered parameters, got a set, whose order differs between ranks")
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Read a group."""
        super().add_param_group(copied_group(param_group))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Refuse."""
        # torch.optim wraps the step of every class of which it makes an object: it must not be Optimizer's.
        raise NotImplementedError("it only reads")


def copied_group(group: Any) -> Any:  # noqa: ANN401 - torch.optim refuses what is no dict
    """Copy a group of the user, since keys of ours are removed from it."""
    return dict(group) if isinstance(group, dict) else group


def taken_cuts(group: ParamGroup, default: bool) -> bool:
    """Take "cuts" out of a group: whether its parameters may be cut."""
    cuts = group.pop("cuts", default)
    check_flags(cuts=cuts)
    return bool(cuts)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What the constructor's groups ask for that is the library's, taken out of them; one entry a group.

    Attributes:
        costs: of parameters.
        may_cut: whether parameters may be cut, as the user wants it.
        specs: of groups with a class of their own.
    """

    costs: list[Cost]
    may_cut: list[bool]
    specs: list[OptimizerSpec | None]

    @classmethod
    def taken_from(cls, groups: Sequence[ParamGroup], options: ShardingOptions) -> "GroupOptions":
        """Take them out of groups; does not communicate.

        Raises:
            TypeError: something is of the wrong kind.
            ValueError: something is out of range.
        """
        costs = [cost_named(group.pop("cost", options.cost)) for group in groups]
        may_cut = [taken_cuts(group, options.cuts) for group in groups]
        return cls(costs, may_cut, [OptimizerSpec.taken_from(group) for group in groups])

    def why_whole(
        self,
        default: OptimizerSpec,
        groups: Sequence[ParamGroup],
        cut_rows: Callable[[Tensor, Pieces], CutRows],
        pieces: Sequence[Pieces],
        *,
        is_tried: bool,
    ) -> list[str | None]:
        """Tell of each parameter why it is not cut, see `why_not_cut`; None if it may be."""
        reasons = why_not_cut(default, groups, self.specs, cut_rows, pieces, is_tried=is_tried)
        allowed = [may for may, group in zip(self.may_cut, groups, strict=True) for _ in group["params"]]
        return [reason if may else KEPT_WHOLE for reason, may in zip(reasons, allowed, strict=True)]


def kept_whole_in(groups: Sequence[ParamGroup], may_cut: Sequence[bool]) -> set[Tensor]:
    """List the parameters of groups that may not be cut."""
    return {param for group, may in zip(groups, may_cut, strict=True) if not may for param in group["params"]}
