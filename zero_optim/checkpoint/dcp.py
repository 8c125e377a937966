"""Adapters for ``torch.distributed.checkpoint`` (DCP): each rank saves and loads what it owns."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from zero_optim.checkpoint.objects import names_of
from zero_optim.comm.agreement import failing_together
from zero_optim.comm.encoding import map_tensors
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import Piece
from zero_optim.plan.strides import contiguous_strides, dense_strides, strides_of_rows
from zero_optim.state.moving import CutState


class OptimizerState:
    """What ``dcp.save`` and ``dcp.load`` get instead of a sharded optimizer.

    ::

        state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path, planner=checkpoint.SafeLoadPlanner())

    Each rank saves and loads what it owns, with any storage of DCP. The model gives the names, unless the
    optimizer was built from named parameters. Loading needs the planner: a new optimizer has no state.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, model: nn.Module | None = None) -> None:
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank owns, or the dict to load into; does not communicate."""
        optimizer, names = self._optimizer, names_of(self._optimizer, self._model)
        name_of, rank, cuts = names.name, optimizer.ranks.rank, optimizer.core.cut_states()
        params = {name_of[param]: param for param in optimizer.owned_parameters()}
        owned = {name: (cuts[p], cuts[p].piece_of(rank)) if p in cuts else None for name, p in params.items()}
        state = Owned(params, owned)
        for key, value in optimizer.owned_state().items():
            if not isinstance(key, Tensor):
                state.setdefault("everywhere", {})[key] = value
                continue
            entries, cut_here = dict(value), owned[name_of[key]]
            if cut_here is not None:
                cut, piece = cut_here
                for name, rows in cut.cut_entries(value, piece).items():
                    entries[name] = RowsToSave.of(rows, cut.shape, piece.start)
            state["state"][name_of[key]] = entries
        groups = zip(optimizer.param_groups, names.groups, strict=True)
        state["options"] = {n: options_of(group) for group, some in groups for n in some if n in owned}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; all ranks call. StateMismatchError if any was without `SafeLoadPlanner`."""
        with failing_together(self._optimizer.ranks):
            if not isinstance(state_dict, Owned) or not state_dict.planned:
                raise StateMismatchError(
                    "the optimizer's state was not asked for: call dcp.load with "
                    "planner=zero_optim.checkpoint.SafeLoadPlanner()"
                )
            names, saved = names_of(self._optimizer, self._model), state_dict["options"]
            state = {names.param[n]: map_tensors(value, _plain) for n, value in state_dict["state"].items()}
            options = [
                next((saved[name] for name in members if name in saved), options_of(group))
                for group, members in zip(self._optimizer.param_groups, names.groups, strict=True)
            ]
        self._optimizer.load_owned_state({**state, **state_dict.get("everywhere", {})}, options)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if type(tensor) is RowsToLoad else tensor


class Owned(dict[str, Any]):
    """A nested dict to save or to load into; ``owned``: names of this rank's, and of cut ones its piece."""

    def __init__(
        self, params: Mapping[str, Tensor], owned: Mapping[str, tuple[CutState, Piece] | None]
    ) -> None:
        super().__init__(state={}, options=None)
        self._params, self._owned = params, owned
        self.planned = False

    def ask_for_all(self, prefix: str, metadata: meta.Metadata) -> None:
        """Add an entry for all that a checkpoint has of the owned names."""
        self.planned = True
        for key, path in (metadata.planner_data or {}).items():
            if path[0] != prefix or (path[1] == "state" and path[2] not in self._owned):
                continue
            about, place = metadata.state_dict_metadata[key], cast("Tensor | None", None)
            if isinstance(about, meta.TensorStorageMetadata):
                name, entry = path[2:] if path[1] == "state" and len(path) == 4 else ("", "")
                place = self._place(str(name), entry, tuple(about.size), about.properties.dtype)
            target: dict[Any, Any] = self
            for part in path[1:-1]:
                target = target.setdefault(part, {})
            target[path[-1]] = place

    def _place(self, name: str, entry: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make what an entry is loaded into, in its parameter's order of memory, as classes make it."""
        param, cut_here = self._params.get(name), self._owned.get(name)
        is_alike = param is not None and param.shape == shape
        strides = dense_strides(param) if param is not None and is_alike else contiguous_strides(shape)
        if cut_here is None or not cut_here[0].is_cut(entry, shape):
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        cut, piece = cut_here
        rows = cut.shape_of(piece)
        place = torch.empty_strided(rows, strides_of_rows(strides, shape[0], rows), dtype=dtype, device="cpu")
        return RowsToLoad.of(place, shape, piece.start)


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, without pickled code; asks for all that a checkpoint has of a rank's own state."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: meta.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See the base class."""
        for prefix, value in state_dict.items():
            if isinstance(value, Owned) and metadata is not None:
                value.ask_for_all(prefix, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:  # noqa: ANN401 - a ReadItem
        """See the base class; refuses whatever would run code."""
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)  # reads it again, and knows where it belongs


class RowsToSave(Tensor):
    """Rows of a tensor, in their own memory, which DCP saves as a part of it; so does a copy of them."""

    _shape: torch.Size  # of the whole tensor
    _start: int  # the first row

    @classmethod
    def of(cls, rows: Tensor, shape: Sequence[int], start: int) -> "RowsToSave":
        """Mark a plain dense tensor as the rows from ``start`` of a tensor of a shape."""
        part = rows.detach().as_subclass(cls)
        part._shape, part._start = torch.Size(shape), start
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run a function of PyTorch; TypeError for a copy to a tensor that would be taken for the whole."""
        if func is Tensor.copy_ and not isinstance(args[0], cls):
            raise TypeError(
                "this stager would save the rows that one rank owns of a parameter's state as if they were "
                "the whole tensor: use dcp.save, checkpoint.save_async, or an optimizer built with cuts=False"
            )
        run: Any = super().__torch_function__
        result = run(func, types, args, kwargs or {})
        if isinstance(result, cls) and args and isinstance(args[0], cls):
            result._shape, result._start = args[0]._shape, args[0]._start
        return result

    def __create_write_items__(self, fqn: str, _object: object) -> list[planning.WriteItem]:
        """Say to DCP what to write."""
        (chunk,) = self.__create_chunk_list__()
        about = meta.TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        data = planning.TensorWriteData(chunk, about, self._shape)
        index = meta.MetadataIndex(fqn, chunk.offsets)
        return [planning.WriteItem(index, planning.WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[meta.ChunkStorageMetadata]:
        """Say to DCP which part it is."""
        sizes = self.as_subclass(Tensor).shape
        offsets = torch.Size([self._start, *[0] * (len(sizes) - 1)])
        return [meta.ChunkStorageMetadata(offsets, sizes)]

    def __get_tensor_shard__(self, _index: meta.MetadataIndex) -> Tensor:
        """Give DCP the rows."""
        return self.as_subclass(Tensor)


class RowsToLoad(RowsToSave):
    """Rows that DCP loads; it compares the size with that of the whole."""

    def size(self) -> torch.Size:  # type: ignore[override]
        """Return the size of the whole."""
        return self._shape
