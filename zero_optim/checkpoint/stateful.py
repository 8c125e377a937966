"""A sharded optimizer in the form that ``torch.distributed.checkpoint`` (DCP) takes.

DCP's planners ask an object which part of a whole it holds, by methods with names of their own. So the state
of a cut parameter is saved as one tensor, of which each owner writes its rows.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zero_optim.checkpoint.data import Box, rows_box
from zero_optim.checkpoint.objects import names_of
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

    Each rank saves and loads what it owns, by parameter name, with any storage of DCP. Each owner of a cut
    parameter has its rows of one tensor. Loading needs the planner: a new optimizer has no state to ask for.

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
        wanted = {name_of[p]: (cuts[p], cuts[p].piece_of(rank)) for p in owned if p in cuts}
        state = Owned((name_of[param] for param in owned), wanted)
        for key, value in self._optimizer.owned_state().items():
            if key in cuts:
                cut, piece = wanted[name_of[key]]
                rows = cut.cut_entries(value, piece)
                parts = {name: RowsToSave.of(part, cut.shape, piece.start) for name, part in rows.items()}
                state["state"][name_of[key]] = {**value, **parts}
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

        StateMismatchError on every rank, if any loaded it without `SafeLoadPlanner`.
        """
        with failing_together(self._optimizer.ranks):
            if not isinstance(state_dict, Owned) or not state_dict.planned:
                raise StateMismatchError(
                    "the optimizer's state was not asked for: call dcp.load with "
                    "planner=zero_optim.checkpoint.SafeLoadPlanner()"
                )
            names, saved = names_of(self._optimizer, self._model), state_dict["options"]
            state = {names.param[name]: value for name, value in state_dict["state"].items()}
            options = [
                next((saved[name] for name in members if name in saved), options_of(group))
                for group, members in zip(self._optimizer.param_groups, names.groups, strict=True)
            ]
        self._optimizer.load_owned_state({**state, **state_dict.get("everywhere", {})}, options)


class Owned(dict[str, Any]):
    """A nested dict to save or to load into, names of its parameters, and pieces of those that are cut."""

    def __init__(self, names: Iterable[str], cuts: Mapping[str, tuple[CutState, Piece]]) -> None:
        super().__init__(state={}, options=None)
        self.names = frozenset(names)
        self.cuts = cuts
        self.planned = False

    def ask_for_all(self, prefix: str, metadata: Metadata) -> dict[str, "RowsToLoad"]:
        """Add an entry for all that a checkpoint has of the wanted names; return those that are rows."""
        self.planned = True
        parts: dict[str, RowsToLoad] = {}
        for key, path in (metadata.planner_data or {}).items():
            if path[0] != prefix or (path[1] == "state" and path[2] not in self.names):
                continue
            about = metadata.state_dict_metadata[key]
            place: Tensor | None = None
            if isinstance(about, TensorStorageMetadata):
                shape, dtype, piece = tuple(about.size), about.properties.dtype, None
                if len(path) == 4 and path[1] == "state" and path[2] in self.cuts:
                    cut, own = self.cuts[str(path[2])]
                    piece = own if cut.is_cut(path[3], shape) else None
                if piece is None:
                    place = torch.empty(shape, dtype=dtype)
                else:
                    parts[key] = RowsToLoad(rows_box(key, dtype, shape, piece.start, piece.stop))
                    place = parts[key].rows
            target: dict[Any, Any] = self
            for part in path[1:-1]:
                target = target.setdefault(part, {})
            target[path[-1]] = place
        return parts


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, without pickled code; it asks for all state that an optimizer owns on this rank.

    The metadata of the checkpoint says what there is to load.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See the base class."""
        rows: dict[str, RowsToLoad] = {}
        for prefix, value in state_dict.items():
            if isinstance(value, Owned) and metadata is not None:
                rows.update(value.ask_for_all(prefix, metadata))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict.update(rows)  # only now: the base class takes nothing but tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See the base class."""
        place = self.state_dict[index.fqn]
        return place.rows if isinstance(place, RowsToLoad) else super().lookup_tensor(index)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:  # noqa: ANN401 - a ReadItem
        """See the base class; refuses whatever would run code."""
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)  # reads it again, and knows where it belongs


class RowsToLoad:
    """CPU memory for the rows of a tensor of which DCP loads a part."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.rows = torch.empty(box.sizes, dtype=box.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say to DCP which part it is."""
        return [_chunk(self._box)]


class RowsToSave(Tensor):
    """Rows of a tensor, in their own memory, which DCP saves as a part of it; so does a copy of them."""

    _box: Box

    @staticmethod
    def of(rows: Tensor, shape: Sequence[int], start: int) -> "RowsToSave":
        """Mark a plain dense tensor as the rows from ``start`` of a tensor of a shape."""
        part = rows.detach().as_subclass(RowsToSave)
        part._box = rows_box("", rows.dtype, shape, start, start + rows.shape[0])
        return part

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run a function of PyTorch; TypeError for a copy to a tensor that would be taken for the whole."""
        if func is Tensor.copy_ and not isinstance(args[0], cls):
            raise TypeError(
                "rows of a cut parameter's state cannot be staged by this stager, which would save them as a "
                "whole tensor: use dcp.save, checkpoint.save_async, or an optimizer built with cuts=False"
            )
        run: Callable[..., Any] = super().__torch_function__
        result = run(func, types, args, kwargs or {})
        source = args[0] if args else None
        if isinstance(result, cls) and isinstance(source, cls):
            result._box = source._box
        return result

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """Say to DCP what to write."""
        chunk = _chunk(self._box)
        about = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        data = TensorWriteData(chunk, about, torch.Size(self._box.shape))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say to DCP which part it is."""
        return [_chunk(self._box)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        """Give DCP the rows."""
        return self.as_subclass(Tensor)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
