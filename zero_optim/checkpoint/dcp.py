"""Adapters for users of ``torch.distributed.checkpoint`` (DCP): ``dcp.save`` and ``dcp.load`` use our files.

DCP's planners decide which rank writes what; `Writer` and `Reader` write and read our files. `save` and
`load` of this package do not use this module. Metadata is JSON. PyTorch's own storage has a pickle, which can
run code when it is read.
"""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
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
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import HeaderChecks, blank, bytes_of, read_box, read_run, write_data
from zero_optim.checkpoint.dcp_rows import RowsToLoad
from zero_optim.checkpoint.lock import FolderLock
from zero_optim.checkpoint.manifest import Chunk, Entry
from zero_optim.checkpoint.safetensors import Box, whole
from zero_optim.checkpoint.storage import complete, data_name, new_token
from zero_optim.plan.pieces import Piece
from zero_optim.state.cut_state import CutState


class Writer(StorageWriter):
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

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See the base class."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See the base class: give every rank the name of its data file."""
        token = new_token()
        return [replace(plan, storage_data=(token, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See the base class. One tensor of extra memory, where it is not contiguous or on another device."""
        token, rank = plan.storage_data
        done: Future[list[WriteResult]] = Future()
        items = {box: (item, run) for item in plan.items for box, run in [_box(item, planner)]}

        def read(box: Box) -> memoryview:
            item, run = items[box]
            if run is not None:
                return run
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)  # a tensor's item
            return bytes_of(data)

        if not items:
            done.set_result([])
            return done
        file, chunks = write_data(self._folder / data_name(token, rank), rank, items, read)
        results = [WriteResult(items[box][0].index, c.nbytes, (c, file)) for box, c in chunks]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See the base class: write the manifest."""
        paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
        written = [result for part in results for result in part]
        files = {chunk.file: file for chunk, file in (result.storage_data for result in written)}
        entries = _entries(metadata, written)
        # Locked only here, since DCP does not say when a save has failed. So other saves may be writing.
        lock = FolderLock(self._folder)
        try:
            complete(self._folder, len(results), files, entries, {}, paths)
        finally:
            lock.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See the base class: any path will do."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _box(item: WriteItem, planner: SavePlanner) -> tuple[Box, memoryview | None]:
    """Return the box of an item, and its bytes if it is not a tensor."""
    about = item.tensor_data
    if about is not None:
        box = about.chunk
        where = tuple(about.size), tuple(box.offsets), tuple(box.sizes)
        return Box(item.index.fqn, about.properties.dtype, *where), None
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)  # it is no tensor's item then
    run = data.getbuffer()
    return whole(item.index.fqn, None, (run.nbytes,)), run


def _entries(metadata: Metadata, results: Iterable[WriteResult]) -> dict[str, Entry]:
    """Combine the planned tensors with the places where they were written."""
    chunks: dict[str, list[Chunk]] = {}
    for result in results:
        chunks.setdefault(result.index.fqn, []).append(result.storage_data[0])
    entries = {}
    for key, found in chunks.items():
        about = metadata.state_dict_metadata[key]
        if isinstance(about, TensorStorageMetadata):
            entries[key] = Entry(about.properties.dtype, tuple(about.size), tuple(found))
        else:
            entries[key] = Entry(None, (), tuple(found))
    return entries


class Reader(StorageReader):
    """Reads a checkpoint, for ``dcp.load(…, storage_reader=Reader(path), planner=SafeLoadPlanner())``.

    Everything that is read is compared with its checksum.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is incomplete or damaged; also from the methods that read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path).absolute()
        self.manifest = manifests.read(self._folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See the base class: another folder for the next load."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id).absolute()
            self.manifest = manifests.read(self._folder)

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """See the base class."""
        paths = {key: tuple(path) for key, path in self.manifest.paths.items()}
        return Metadata(self._about(self.manifest.entries), paths)

    def _about(self, keys: Iterable[str]) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        return {key: _metadata_of(self.manifest.entries[key]) for key in keys}

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: object, **_kwargs: object
    ) -> None:
        """See the base class."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See the base class."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See the base class."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See the base class. One chunk of extra memory, where a part of it is wanted or another device."""
        headers = HeaderChecks(self._folder, self.manifest.files)
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            headers.check(chunk.file)
            if item.type is LoadItemType.BYTE_IO:
                buffer = bytearray(chunk.nbytes)
                read_run(self._folder, chunk, memoryview(buffer), item.storage_index.fqn)
                planner.load_bytes(item, io.BytesIO(buffer))
            else:
                self._read_tensor(item, chunk, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self.manifest.entries[index.fqn].chunks
        wanted = tuple(index.offset) if index.offset is not None else None
        return next(chunk for chunk in chunks if wanted is None or chunk.offsets == wanted)

    def _read_tensor(self, item: ReadItem, chunk: Chunk, planner: LoadPlanner) -> None:
        key = item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        dtype = self.manifest.entries[key].dtype
        assert dtype is not None  # DCP plans tensors for tensors
        read_box(self._folder, chunk, key, dtype, target, item.storage_offsets)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See the base class."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _metadata_of(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.dtype is None:
        return BytesStorageMetadata()
    boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), boxes)


class Owned(dict[str, Any]):
    """A nested dict to load into. Its ``state`` holds what the checkpoint has of some parameters.

    Args:
        names: the wanted keys of ``state``.
        cuts: those of which only a piece is wanted.
    """

    def __init__(
        self, names: Iterable[str], cuts: Mapping[str, tuple[CutState, Piece]] = MappingProxyType({})
    ) -> None:
        super().__init__(state={}, options=None)
        self.names = frozenset(names)
        self.cuts = cuts
        self.planned = False

    def rows_of(self, path: Sequence[Any], shape: Sequence[int]) -> tuple[int, int] | None:
        """Tell which rows are wanted of a tensor at a path in this dict; None for all."""
        if len(path) == 3 and path[0] == "state" and path[1] in self.cuts:
            cut, piece = self.cuts[path[1]]
            if cut.is_cut(path[2], tuple(shape)):
                return piece.start, piece.stop
        return None


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, without pickled code; it asks for all state that an optimizer owns on this rank.

    A new optimizer has no state with keys to ask for. So the metadata of the checkpoint says what there is to
    load.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See the base class."""
        rows: dict[str, RowsToLoad] = {}
        for prefix, value in state_dict.items():
            if isinstance(value, Owned) and metadata is not None:
                rows.update(_ask_for(value, prefix, metadata))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict.update(rows)  # only now: the base class takes nothing but tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See the base class."""
        place = self.state_dict[index.fqn]
        return place.rows if isinstance(place, RowsToLoad) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See the base class; refuses whatever would run code."""
        safe = io.BytesIO()
        loaded = torch.load(value, weights_only=True)
        torch.save(loaded, safe)  # the base class, which knows where it belongs, reads it again
        safe.seek(0)
        super().load_bytes(read_item, safe)


def _ask_for(value: Owned, prefix: str, metadata: Metadata) -> dict[str, RowsToLoad]:
    """Add an entry for everything that a checkpoint has of the wanted names.

    Returns:
        The entries that are rows of a tensor, by key; their memory is in the dict.
    """
    value.planned = True
    rows: dict[str, RowsToLoad] = {}
    for key, path in (metadata.planner_data or {}).items():
        if path[0] != prefix or (path[1] == "state" and path[2] not in value.names):
            continue
        about = metadata.state_dict_metadata[key]
        place: Tensor | None = None
        if isinstance(about, TensorStorageMetadata):
            shape, dtype = tuple(about.size), about.properties.dtype
            wanted = value.rows_of(path[1:], shape)
            if wanted is None:
                place = blank(shape, dtype)
            else:
                rows[key] = RowsToLoad(shape, dtype, *wanted)
                place = rows[key].rows
        target: dict[Any, Any] = value
        for part in path[1:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = place
    return rows
