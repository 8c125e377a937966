"""The names by which trainers read PyTorch's ``ZeroRedundancyOptimizer``, answered by ours.

Some trainers write each rank's own state to a file. They take it from the local optimizer, ``optim``, and
find the index of each parameter by private attributes of PyTorch's class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import piece_of
from zero_optim.state.owning import OwningOptimizer


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """Several optimizers as one, to be read.

    Args:
        optimizers: those that step this rank's leaves.
        param_groups: the groups of all of them, in the order in which the user gave them.
        state: of what this rank owns, by parameter of the model; a leaf finds its entries too.
    """

    optimizers: tuple[Optimizer, ...]
    param_groups: list[ParamGroup]
    state: Mapping[Any, Any]


class LocalView:
    """A local optimizer that steps leaves, with a state that is found by parameters of the model too.

    All else is the optimizer's own, and ``isinstance`` takes it for one of its class.

    Args:
        optimizer: the local optimizer.
        state: as of `OptimizerView`.
    """

    def __init__(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        vars(self).update(_optimizer=optimizer, state=state)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # noqa: ANN401 - the user's class
        """The class of the optimizer."""
        return type(vars(self)["_optimizer"])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_optimizer"], name, value)

    def __repr__(self) -> str:
        return repr(vars(self)["_optimizer"])


class TorchNames(OwningOptimizer):
    """Answers to names of PyTorch's class. Nothing here communicates."""

    @property
    def optim(self) -> Optimizer | OptimizerView:
        """The local optimizer of this rank, or with several classes a view of all local optimizers.

        PyTorch's class has it too. Its ``param_groups`` have what this rank steps: parameters, the rows that
        it owns of cut ones, or master copies. Its ``state`` is found by these, and by the parameters of the
        model. Only read it. Does not communicate. The rows that it steps of a cut parameter have values until
        the next step; after that, ask again.
        """
        self._owned.leaves.follow()
        optimizers, groups = self._owned.local.shown()
        if len(optimizers) > 1:
            return OptimizerView(optimizers, groups, self.state)
        local: Any = optimizers[0]
        return local if local.state is self.state else LocalView(local, self.state)  # type: ignore[return-value]

    @property
    def _all_params(self) -> list[Tensor]:
        return self._params()

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return {param: index for index, param in enumerate(self._params())}

    def _partition_parameters(self) -> list[list[ParamGroup]]:
        """List for each rank the groups, with the parameters of which it owns rows."""

        def members(group: ParamGroup, rank: int) -> list[Tensor]:
            return [p for p in group["params"] if piece_of(self._sharding.pieces[p], rank) is not None]

        ranks = range(self._ranks.size)
        return [[{**group, "params": members(group, rank)} for group in self.param_groups] for rank in ranks]

    def _check_overlap_initialized(self) -> None:
        """Do nothing: ours is ready when it is built."""

    @staticmethod
    def _sync_param_groups(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
        """Copy the options of groups to others."""
        for group, other in zip(source, target, strict=True):
            other.update(options_of(group))
