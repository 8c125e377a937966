"""A sharded optimizer as ``torch.distributed.checkpoint`` takes it, for those who call that themselves."""

from typing import Any

from torch import Tensor, nn

from zero_optim.checkpoint.dcp import Owned
from zero_optim.checkpoint.names import names_of
from zero_optim.comm.agreement import failing_together
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of


class OptimizerState:
    """What to give ``dcp.save`` and ``dcp.load`` in the place of a sharded optimizer.

    ::

        state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
        dcp.save(state, storage_writer=checkpoint.Writer(path))
        dcp.load(state, storage_reader=checkpoint.Reader(path), planner=checkpoint.SafeLoadPlanner())

    Each rank gives and takes the state of what it owns, by parameter name. Any storage of DCP's will do;
    the planner is needed to load, since a fresh optimizer has nothing yet that could be asked for.

    Args:
        optimizer: to save or to load into, fresh or not.
        model: gives the names, unless the optimizer was built from named parameters.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, model: nn.Module | None = None) -> None:
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Give the state owned here, and what a load asks for; does not communicate."""
        names = names_of(self._optimizer, self._model)
        name_of = names.name
        state = Owned(name_of[param] for param in self._optimizer.owned_parameters())
        for key, value in self._optimizer.owned_state().items():
            if isinstance(key, Tensor):
                state["state"][name_of[key]] = dict(value)
            else:
                state.setdefault("everywhere", {})[key] = value
        groups = zip(self._optimizer.param_groups, names.groups, strict=True)
        state["options"] = {
            name: options_of(group) for group, members in groups for name in members if name in state.names
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was loaded; all ranks call. The parameters are the model's to load.

        Raises:
            StateMismatchError: on every rank, if one on any was loaded by a planner that asks a fresh
                optimizer for nothing.
        """
        with failing_together(self._optimizer.ranks):
            if not isinstance(state_dict, Owned) or not state_dict.planned:
                raise StateMismatchError(
                    "the optimizer's state was not asked for: call dcp.load with "
                    "planner=zero_optim.checkpoint.SafeLoadPlanner()"
                )
            names = names_of(self._optimizer, self._model)
            state = {names.param[name]: value for name, value in state_dict["state"].items()}
            groups = zip(self._optimizer.param_groups, names.groups, strict=True)
            options = [_first(members, state_dict["options"], group) for group, members in groups]
        self._optimizer.load_owned_state({**state, **state_dict.get("everywhere", {})}, options)


def _first(members: list[str], saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    return next((saved[name] for name in members if name in saved), options_of(group))
