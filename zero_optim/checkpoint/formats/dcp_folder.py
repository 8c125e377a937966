"""Folders of ``torch.distributed.checkpoint`` (DCP), as FSDP2 saves: read and written without a group.

PyTorch's own storage keeps all tensors until a file is complete, and unpickles what it reads. Here one tensor
is in memory, and no code runs.
"""

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero_optim.checkpoint.content import MODEL, OPTIMIZER
from zero_optim.checkpoint.data import CheckpointReader
from zero_optim.checkpoint.files import open_regular
from zero_optim.checkpoint.formats.unpickling import SafeUnpickler
from zero_optim.checkpoint.manifest import FILE
from zero_optim.checkpoint.sections import EXACT, Placeholders, Source, source_of
from zero_optim.comm.encoding import map_tensors
from zero_optim.errors import StateMismatchError

METADATA = ".metadata"


# ---------------------------------------------------------------------- reading


def of_dcp(folder: Path, names: Sequence[str] | None = None) -> Source:
    """Open a folder that ``dcp.save`` wrote, with its own storage or with `Writer`."""
    values, places = dict[str, Any](), Placeholders()
    if (folder / FILE).exists():
        reader = CheckpointReader(folder)
        paths: Mapping[str, Any] = reader.manifest.paths
        for key, whole in reader.manifest.entries.items():
            if whole.dtype is None:
                content = bytearray(whole.nbytes)
                reader.read(key, whole.chunks[0], memoryview(content))
                values[key] = _loaded(content)
            else:
                values[key] = places.add(whole.dtype, whole.shape, partial(reader.read_tensor, key))
    else:
        with open_regular(folder / METADATA) as file:
            metadata: meta.Metadata = SafeUnpickler(file).load()
        paths = metadata.planner_data or {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, meta.BytesStorageMetadata):
                values[key] = _loaded(_bytes(folder, metadata, meta.MetadataIndex(key)))
                continue
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"the chunks of {key} are not all of a tensor of shape {tuple(entry.size)}")
            read = partial(_tensor, folder, metadata, key, entry)
            values[key] = places.add(entry.properties.dtype, entry.size, read)
    return source_of(_nested(values, paths), folder, names, places)


def _bytes(folder: Path, metadata: meta.Metadata, index: meta.MetadataIndex) -> bytearray:
    place = metadata.storage_data[index]
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"{index.fqn} was transformed by {place.transform_descriptors[0]} when it was written"
        )
    content = bytearray(place.length)
    with open_regular(folder / place.relative_path) as file:
        file.seek(place.offset)
        if file.readinto(content) != place.length:
            raise ValueError(f"{place.relative_path} is too short for {index.fqn}")
    return content


def _loaded(content: bytearray) -> Any:  # noqa: ANN401 - whatever was saved
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(folder: Path, metadata: meta.Metadata, key: str, entry: meta.TensorStorageMetadata) -> Tensor:
    whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        part = _loaded(_bytes(folder, metadata, meta.MetadataIndex(key, chunk.offsets)))
        if part.shape != chunk.sizes or part.dtype != whole.dtype:
            raise ValueError(f"a chunk of {key} has shape {tuple(part.shape)} of {part.dtype}")
        rows = [slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        whole[tuple(rows)].copy_(part)
    return whole


def _nested(values: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Put values at their paths in a nested dict."""
    whole: dict[Any, Any] = {}
    for key, value in values.items():
        *parents, last = paths.get(key, (key,))
        inner = whole
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    nested: dict[str, Any] = _with_lists(whole)
    return nested


def _with_lists(value: Any) -> Any:  # noqa: ANN401 - nested dicts
    """Make lists of dicts whose keys are places, and keys of state by index integers again."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(part) for key, part in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    if {"state", "param_groups"} <= inner.keys():
        indices = {key for group in inner["param_groups"] for key in group["params"] if isinstance(key, int)}
        inner["state"] = {
            int(key) if str(key).isdecimal() and int(key) in indices else key: part
            for key, part in inner["state"].items()
        }
    return inner


# ---------------------------------------------------------------------- writing


class _LazyPlanner(DefaultSavePlanner):
    """Reads what placeholders stand for when it is written."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._read = read

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: meta.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        whole = _nested(self.state_dict, self.mappings)
        for name in (MODEL, OPTIMIZER):
            if not _is_same(state_dict.get(name), whole.get(name)):
                raise StateMismatchError(
                    f"the {name} has keys that are not text, or empty containers, which DCP does not keep"
                )

    def lookup_object(self, index: meta.MetadataIndex) -> Any:  # noqa: ANN401 - a tensor or any value
        return map_tensors(super().lookup_object(index), self._read)  # in a tuple they are saved as one value


class _Writer(FileSystemWriter):
    """Writes one file, and keeps nothing that is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = "__0_0.distcp", list[WriteResult]()
        with (Path(self.path) / name).open("xb") as file:
            for item in plan.items:
                start, data = file.tell(), planner.resolve_data(item)
                if isinstance(data, Tensor):
                    torch.save(data.clone() if data.untyped_storage().nbytes() > data.nbytes else data, file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                del data  # before the next one is read
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write_dcp(sections: dict[str, Any], places: Placeholders, folder: Path) -> None:
    """Write sections as ``dcp.save`` does, one tensor at a time."""
    rest = {name: value for name, value in sections.items() if name not in (MODEL, OPTIMIZER)}
    sections = sections | {EXACT: (rest,)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(sections, storage_writer=_Writer(folder), planner=_LazyPlanner(places.read), no_dist=True)
        except CheckpointException as error:  # no Exception, and wraps one
            raise error.failures[0][0] from error


def _is_same(value: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(value, dict):
        same = isinstance(other, dict) and value.keys() == other.keys()
        return same and all(_is_same(part, other[key]) for key, part in value.items())
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return all(map(_is_same, value, other))
    return value is other
