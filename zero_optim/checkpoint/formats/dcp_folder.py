"""Folders of ``torch.distributed.checkpoint`` (DCP): one tensor in memory, no code run, no group."""

import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as meta

from zero_optim.checkpoint.content import RankContent
from zero_optim.checkpoint.data import lazy
from zero_optim.checkpoint.files import open_regular, within
from zero_optim.checkpoint.formats.unpickling import SafeUnpickler
from zero_optim.checkpoint.sections import source_of


def of_dcp(folder: Path) -> RankContent:
    """Open a folder that ``dcp.save`` wrote with its own storage."""
    nested = dict[Any, Any]()
    with open_regular(folder / ".metadata") as raw, io.BufferedReader(raw) as file:
        metadata: meta.Metadata = SafeUnpickler(file).load()
    for key, entry in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(entry, meta.BytesStorageMetadata):
            value = _loaded(folder, metadata, meta.MetadataIndex(key))
        elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the chunks of {key} are not all of a tensor of shape {tuple(entry.size)}")
        else:
            read = partial(_fill, folder, metadata, key, entry)
            value = lazy(entry.properties.dtype, entry.size, read)
        *parents, last = (metadata.planner_data or {}).get(key, (key,))
        inner = nested
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return source_of(_with_lists(nested), folder)


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


def _fill(
    folder: Path, metadata: meta.Metadata, key: str, entry: meta.TensorStorageMetadata, whole: Tensor
) -> None:
    for chunk in entry.chunks:
        part = _loaded(folder, metadata, meta.MetadataIndex(key, chunk.offsets))
        if part.shape != chunk.sizes or part.dtype != whole.dtype:
            raise ValueError(f"a chunk of {key} has shape {tuple(part.shape)} of {part.dtype}")
        rows = [slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        whole[tuple(rows)].copy_(part)


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
