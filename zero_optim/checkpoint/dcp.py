"""Adapters for users of ``torch.distributed.checkpoint`` (DCP), whose planners decide which rank writes what.

`Writer` and `Reader` write and read our files in ``dcp.save`` and ``dcp.load``: PyTorch's own storage has a
pickle, which can run code when it is read. `OptimizerState` shows a sharded optimizer. DCP's planners ask an
object which part of a whole it holds, by methods with names of their own. So the state of a cut parameter is
saved as one tensor, of which each owner writes its rows.
"""

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint.data import Box, CheckpointReader, box_of, bytes_of, write_tensors
from zero_optim.checkpoint.files import FolderLock
from zero_optim.checkpoint.manifest import Chunk, Manifest
from zero_optim.checkpoint.objects import names_of
from zero_optim.comm.agreement import failing_together
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import Piece
from zero_optim.state.moving import CutState

T = TypeVar("T")

# ---------------------------------------------------------------------- our files


class _AnyPath:
    """What `Writer` and `Reader` do in the same way."""

    def prepare_local_plan(self, plan: Any) -> Any:  # noqa: ANN401 - a plan of either kind
        """See the base class."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See the base class: any path will do."""
        return isinstance(checkpoint_id, str | os.PathLike)


class Writer(_AnyPath, StorageWriter):
    """Writes a checkpoint into a folder, for ``dcp.save(…, storage_writer=Writer(path))``.

    Each rank writes one data file. The coordinator completes the checkpoint with the manifest, which replaces
    a checkpoint that is already in the folder.

    Args:
        path: the checkpoint's own folder; made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = folders.own_folder(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See the base class: another folder for the next save."""
        if checkpoint_id is not None:
            self._folder = folders.own_folder(checkpoint_id)

    # DCP passes arguments of its own to a parameter called "kwargs", and calls again after a failure.
    def set_up_storage_writer(self, is_coordinator: bool, *_args: object, **_kwargs: object) -> None:
        """See the base class: make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See the base class: give every rank the name of its data file."""
        token = folders.new_token()
        return [replace(plan, storage_data=(token, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See the base class. One tensor of extra memory, where it is not contiguous or on another device."""
        runs: dict[Box, memoryview] = {}  # of what is not a tensor
        items: dict[Box, WriteItem] = {}
        for item in plan.items:
            key, about = item.index.fqn, item.tensor_data
            if about is not None:
                where = tuple(about.size), tuple(about.chunk.offsets), tuple(about.chunk.sizes)
                box = Box(key, about.properties.dtype, *where)
            else:
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)  # it is no tensor's item
                box = box_of(key, None, (data.getbuffer().nbytes,))
                runs[box] = data.getbuffer()
            items[box] = item

        def read(box: Box) -> memoryview:
            if box in runs:
                return runs[box]
            data = planner.resolve_data(items[box])
            assert isinstance(data, Tensor)  # a tensor's item
            return bytes_of(data)

        token, rank = plan.storage_data
        files, written = write_tensors(self._folder, token, rank, items, read)
        return _done([WriteResult(items[b].index, c.nbytes, (b, c, files)) for b, c in written])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See the base class: write the manifest."""
        paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
        parts = [result.storage_data for part in results for result in part]
        files = {name: file for _, _, of_rank in parts for name, file in of_rank.items()}
        written = [(box, chunk) for box, chunk, _ in parts]
        # Locked only here, since DCP does not say when a save has failed. So other saves may be writing.
        with closing(FolderLock(self._folder)):
            folders.complete(self._folder, len(results), files, written, {}, paths)


class Reader(_AnyPath, StorageReader):
    """Reads a checkpoint, for ``dcp.load(…, storage_reader=Reader(path), planner=SafeLoadPlanner())``.

    Everything that is read is compared with its checksum.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is incomplete or damaged; also from the methods that read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = CheckpointReader(Path(path).absolute())

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint holds."""
        return self._reader.manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See the base class: another folder for the next load."""
        if checkpoint_id is not None:
            self._reader = CheckpointReader(Path(checkpoint_id).absolute())

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """See the base class."""
        metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key, entry in self.manifest.entries.items():
            if entry.dtype is None:
                metadata[key] = BytesStorageMetadata()
            else:
                boxes, properties = (
                    [_chunk(each) for each in entry.chunks],
                    TensorProperties(dtype=entry.dtype),
                )
                metadata[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        return Metadata(metadata, {key: tuple(path) for key, path in self.manifest.paths.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: object, **_kwargs: object
    ) -> None:
        """See the base class."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See the base class."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See the base class. One chunk of extra memory, where a part of it is wanted or another device."""
        for item in plan.items:
            key, place = item.storage_index.fqn, item.storage_index.offset
            chunks = self.manifest.entries[key].chunks
            chunk = next(c for c in chunks if place is None or c.offsets == tuple(place))
            if item.type is LoadItemType.BYTE_IO:
                buffer = bytearray(chunk.nbytes)
                self._reader.read(key, chunk, memoryview(buffer))
                planner.load_bytes(item, io.BytesIO(buffer))
            else:
                target = planner.resolve_tensor(item).detach()
                self._reader.read_box(key, chunk, target, item.storage_offsets)
                planner.commit_tensor(item, target)
        return _done(None)


def _chunk(part: Box | Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


# ---------------------------------------------------------------------- sharded optimizers


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
        optimizer, names = self._optimizer, names_of(self._optimizer, self._model)
        name_of, rank = names.name, optimizer.ranks.rank
        owned, cuts = optimizer.owned_parameters(), optimizer.core.cut_states()
        wanted = {name_of[p]: (cuts[p], cuts[p].piece_of(rank)) for p in owned if p in cuts}
        state = Owned((name_of[param] for param in owned), wanted)
        for key, value in optimizer.owned_state().items():
            if isinstance(key, Tensor):
                entries = state["state"][name_of[key]] = dict(value)
                if key in cuts:
                    cut, piece = wanted[name_of[key]]
                    for name, rows in cut.cut_entries(value, piece).items():
                        entries[name] = RowsToSave.of(rows, cut.shape, piece.start)
            else:
                state.setdefault("everywhere", {})[key] = value
        groups = zip(optimizer.param_groups, names.groups, strict=True)
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
                    parts[key] = RowsToLoad(box_of(key, dtype, shape, (piece.start, piece.stop)))
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
        part._box = box_of("", rows.dtype, shape, (start, start + rows.shape[0]))
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
