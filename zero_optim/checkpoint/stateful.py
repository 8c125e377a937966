"""A sharded optimizer in the form that ``torch.distributed.checkpoint`` (DCP) takes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zero_optim.checkpoint.dcp import Owned
from zero_optim.checkpoint.dcp_rows import RowsToSave
from zero_optim.checkpoint.names import names_of
from zero_optim.comm.agreement import failing_together
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import Piece
from zero_optim.state.cut_state import CutState


class OptimizerState:
    """What ``dcp.save`` and ``dcp.load`` get instead of a sharded optimizer.

    ::

        state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
        dcp.save(state, storage_writer=checkpoint.Writer(path))
        dcp.load(state, storage_reader=checkpoint.Reader(path), planner=checkpoint.SafeLoadPlanner())

    Each rank saves and loads the state of what it owns, by parameter name. The state of a cut parameter is
    one tensor for DCP, of which each owner has its rows. Any storage of DCP can be used.
    Loading needs the planner, since a new optimizer has no state to ask for yet.

    Args:
        optimizer: to save or to load into, new or not.
        model: gives the names, unless the optimizer was built from named parameters.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, model: nn.Module | None = None) -> None:
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank owns, or the dict to load into; does not communicate."""
        names = names_of(self._optimizer, self._model)
        name_of, rank = names.name, self._optimizer.ranks.rank
        owned, cuts = self._optimizer.owned_parameters(), self._optimizer.core.cut_states()
        wanted = {
            name_of[param]: (cuts[param], cuts[param].piece_of(rank)) for param in owned if param in cuts
        }
        state = Owned((name_of[param] for param in owned), wanted)
        for key, value in self._optimizer.owned_state().items():
            if key in cuts:
                state["state"][name_of[key]] = _rows_to_save(value, *wanted[name_of[key]])
            elif isinstance(key, Tensor):
                state["state"][name_of[key]] = dict(value)
            else:
                state.setdefault("everywhere", {})[key] = value
        groups = zip(self._optimizer.param_groups, names.groups, strict=True)
        state["options"] = {
            name: options_of(group) for group, members in groups for name in members if name in state.names
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; all ranks call. The model loads the parameters.

        Raises:
            StateMismatchError: on every rank, if it was loaded on any without `SafeLoadPlanner`, so a new
                optimizer got nothing.
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


def _rows_to_save(entries: Mapping[str, Any], cut: CutState, piece: Piece) -> dict[str, Any]:
    rows = cut.cut_entries(entries, piece)
    parts = {name: RowsToSave.of(part, cut.shape, piece.start) for name, part in rows.items()}
    return {**entries, **parts}


def _first(members: list[str], saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    return next((saved[name] for name in members if name in saved), options_of(group))
