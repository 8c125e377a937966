"""Adapters for users of ``torch.distributed.checkpoint`` (DCP): ``dcp.save`` and ``dcp.load`` use our files.

DCP's planners decide which rank writes what; `Writer` and `Reader` write and read our files. `save` and
`load` of this package do not use DCP. PyTorch's own storage has a pickle, which can run code when it is read.
"""

import io
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint.data import Box, bytes_of, whole, write_tensors
from zero_optim.checkpoint.files import FolderLock
from zero_optim.checkpoint.manifest import Chunk, Entry, Manifest
from zero_optim.checkpoint.reader import CheckpointReader


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
        items = {box: (item, run) for item in plan.items for box, run in [_box(item, planner)]}

        def read(box: Box) -> memoryview:
            item, run = items[box]
            if run is not None:
                return run
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)  # a tensor's item
            return bytes_of(data)

        token, rank = plan.storage_data
        files, written = write_tensors(self._folder, token, rank, items, read)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(items[b][0].index, c.nbytes, (b, c, files)) for b, c in written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See the base class: write the manifest."""
        paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
        told = [result.storage_data for part in results for result in part]
        files = {name: file for _, _, of_rank in told for name, file in of_rank.items()}
        written = [(box, chunk) for box, chunk, _ in told]
        # Locked only here, since DCP does not say when a save has failed. So other saves may be writing.
        with closing(FolderLock(self._folder)):
            folders.complete(self._folder, len(results), files, written, {}, paths)


def _box(item: WriteItem, planner: SavePlanner) -> tuple[Box, memoryview | None]:
    """Return the box of an item, and its bytes if it is not a tensor."""
    about = item.tensor_data
    if about is not None:
        chunk = about.chunk
        where = tuple(about.size), tuple(chunk.offsets), tuple(chunk.sizes)
        return Box(item.index.fqn, about.properties.dtype, *where), None
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)  # it is no tensor's item then
    run = data.getbuffer()
    return whole(item.index.fqn, None, (run.nbytes,)), run


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
        paths = {key: tuple(path) for key, path in self.manifest.paths.items()}
        return Metadata({key: _metadata_of(entry) for key, entry in self.manifest.entries.items()}, paths)

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
            key, chunk = item.storage_index.fqn, self._chunk(item.storage_index)
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._reader.read_bytes(key, chunk))
            else:
                target = planner.resolve_tensor(item).detach()
                self._reader.read_box(key, chunk, target, item.storage_offsets)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self.manifest.entries[index.fqn].chunks
        wanted = tuple(index.offset) if index.offset is not None else None
        return next(chunk for chunk in chunks if wanted is None or chunk.offsets == wanted)


def _metadata_of(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.dtype is None:
        return BytesStorageMetadata()
    boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), boxes)
