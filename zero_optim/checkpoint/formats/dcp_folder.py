"""Folders of ``torch.distributed.checkpoint`` (DCP): one tensor in memory, no code run, no group."""

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as meta

from zero_optim.checkpoint.content import MODEL, OPTIMIZER, RankContent
from zero_optim.checkpoint.data import lazy
from zero_optim.checkpoint.files import open_regular, within
from zero_optim.checkpoint.formats.unpickling import SafeUnpickler
from zero_optim.checkpoint.sections import EXACT, source_of, torch_save
from zero_optim.compat import private
from zero_optim.errors import StateMismatchError

METADATA = ".metadata"


def of_dcp(folder: Path, names: Sequence[str] | None = None) -> RankContent:
    """Open a folder that ``dcp.save`` wrote with its own storage."""
    values = dict[str, Any]()
    with open_regular(folder / METADATA) as raw, io.BufferedReader(raw) as file:
        metadata: meta.Metadata = SafeUnpickler(file).load()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, meta.BytesStorageMetadata):
            values[key] = _loaded(folder, metadata, meta.MetadataIndex(key))
            continue
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the chunks of {key} are not all of a tensor of shape {tuple(entry.size)}")
        read = partial(_tensor, folder, metadata, key, entry)
        values[key] = lazy(entry.properties.dtype, entry.size, read)
    return source_of(_nested(values, metadata.planner_data or {}), folder, names)


def _loaded(folder: Path, metadata: meta.Metadata, index: meta.MetadataIndex) -> Any:  # noqa: ANN401
    place = metadata.storage_data[index]
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"{index.fqn} was transformed by {place.transform_descriptors[0]} when it was written"
        )
    content = bytearray(place.length)
    with open_regular(within(folder, place.relative_path)) as file:
        file.seek(place.offset)
        if file.readinto(content) != place.length:
            raise ValueError(f"{place.relative_path} is too short for {index.fqn}")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(folder: Path, metadata: meta.Metadata, key: str, entry: meta.TensorStorageMetadata) -> Tensor:
    whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="cpu")
    for chunk in entry.chunks:
        part = _loaded(folder, metadata, meta.MetadataIndex(key, chunk.offsets))
        if part.shape != chunk.sizes or part.dtype != whole.dtype:
            raise ValueError(f"a chunk of {key} has shape {tuple(part.shape)} of {part.dtype}")
        rows = [slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        whole[tuple(rows)].copy_(part)
    return whole


def _nested(values: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
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


def write_dcp(sections: dict[str, Any], folder: Path) -> None:
    """Write sections as ``dcp.save`` of one rank does; each tensor has a storage of its own."""
    name, metadata = "__0_0.distcp", meta.Metadata({}, {}, {})
    rest = {section: value for section, value in sections.items() if section not in (MODEL, OPTIMIZER)}
    with (folder / name).open("xb") as file:
        for path, value in _flat({**sections, EXACT: (rest,)}):
            key, start = ".".join(map(str, path)), file.tell()
            index = meta.MetadataIndex(key)
            entry: Any = meta.BytesStorageMetadata()
            if isinstance(value, Tensor):
                chunk = meta.ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
                properties = meta.TensorProperties.create_from_tensor(value)
                index = meta.MetadataIndex(key, chunk.offsets, 0)
                entry = meta.TensorStorageMetadata(properties, value.shape, [chunk])
            torch_save(value, file)
            if key in metadata.state_dict_metadata:
                raise StateMismatchError(f"two values have the name {key} in a folder of DCP")
            metadata.state_dict_metadata[key], metadata.planner_data[key] = entry, path
            metadata.storage_data[index] = private.StorageInfo(name, start, file.tell() - start)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def _flat(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:  # noqa: ANN401
    """Yield the values of nested dicts, and of lists with tensors or dicts in them, with their paths."""
    if isinstance(value, list) and any(isinstance(part, dict | Tensor) for part in value):
        pairs: Any = enumerate(value)
    elif isinstance(value, dict) and value:
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong and path[0] in (MODEL, OPTIMIZER):
            raise StateMismatchError(
                f"{'.'.join(map(str, path))} has the key {wrong[0]!r}, and DCP keeps those that are text"
            )
        pairs = ((str(key), part) for key, part in value.items())
    else:
        yield path, value
        return
    for key, part in pairs:
        yield from _flat(part, (*path, key))
