"""What a checkpoint holds and where: one JSON file, whose presence says that the checkpoint is complete.

No part of a checkpoint is a pickle: this file is JSON, and the data files are plain bytes of tensors.
docs/checkpoints.md has the format.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zero_optim.errors import CheckpointError

FILE = "manifest.json"
PART = FILE + ".part"
FORMAT = "zero_optim checkpoint"
VERSION = 1
DATA_FILE = re.compile(r"data-[0-9a-f]+-[0-9]+\.bin")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor's elements, row after row, in one run of bytes of a data file.

    Attributes:
        offsets, sizes: the box; of a value that is no tensor both are empty.
        file: name of the data file.
        start, nbytes: the run, in bytes.
        crc32: checksum of the run.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or bytes.

    Attributes:
        dtype: None for bytes.
        shape: of the whole tensor.
        chunks: which together hold it.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        """Prove that the runs are as long as the boxes are large."""
        for chunk in self.chunks:
            wanted = math.prod(chunk.sizes) * self.dtype.itemsize if self.dtype is not None else chunk.nbytes
            if chunk.nbytes != wanted or len(chunk.sizes) != len(self.shape) or chunk.start < 0:
                raise ValueError(f"a chunk of {chunk.sizes} elements of {self.dtype} in {chunk.nbytes} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of tensors' bytes: which rank wrote it, and how long it is."""

    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        time_ns: when it was completed, in ns since 1970.
        world_size: ranks that wrote it.
        software: versions of what wrote it.
        files: the data files, by name.
        entries: tensors and bytes, by key.
        values: values in JSON, by key; see `values`.
        paths: of keys that ``dcp.save`` wrote, where they belong in the nested dict.
    """

    time_ns: int
    world_size: int
    software: Mapping[str, str]
    files: Mapping[str, DataFile]
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    paths: Mapping[str, list[str | int]]

    def __post_init__(self) -> None:
        """Prove that every chunk lies inside a file of the checkpoint's own."""
        for name in self.files:
            if not DATA_FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a data file")
        for key, entry in self.entries.items():
            for chunk in entry.chunks:
                if chunk.file not in self.files or chunk.start + chunk.nbytes > self.files[chunk.file].nbytes:
                    raise ValueError(f"{key} lies outside {chunk.file}")

    def to_json(self) -> str:
        """Write as JSON, with a checksum of its own."""
        names = {name: number for number, name in enumerate(self.files)}
        content = {
            "time_ns": self.time_ns,
            "world_size": self.world_size,
            "software": dict(self.software),
            "files": [[name, file.rank, file.nbytes] for name, file in self.files.items()],
            "entries": {key: _entry_json(entry, names) for key, entry in self.entries.items()},
            "values": dict(self.values),
            "paths": dict(self.paths),
        }
        text = json.dumps(content, separators=(",", ":"))
        head = {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode())}
        return f"{json.dumps(head)}\n{text}\n"

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Read what `to_json` wrote, of this version or an older one.

        Raises:
            ValueError: it is damaged, or of a version to come; the message says which.
        """
        head_line, _, body = text.partition("\n")
        head = json.loads(head_line)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError("it is none of zero_optim's")
        if head["version"] > VERSION:
            raise ValueError(
                f"its format has version {head['version']}, this zero_optim reads up to {VERSION}"
            )
        body = body.removesuffix("\n")
        if zlib.crc32(body.encode()) != head["crc32"]:
            raise ValueError("its checksum is wrong")
        return _from_content(json.loads(body))


def _entry_json(entry: Entry, names: Mapping[str, int]) -> list[Any]:
    dtype = None if entry.dtype is None else str(entry.dtype).removeprefix("torch.")
    chunks = [list(asdict(chunk).values()) for chunk in entry.chunks]
    for chunk in chunks:
        chunk[2] = names[chunk[2]]
    return [dtype, list(entry.shape), chunks]


def _from_content(content: dict[str, Any]) -> Manifest:
    names = [name for name, _, _ in content["files"]]
    entries = {}
    for key, (dtype, shape, rows) in content["entries"].items():
        chunks = [Chunk(tuple(o), tuple(s), names[file], *rest) for o, s, file, *rest in rows]
        entries[key] = Entry(None if dtype is None else dtype_named(dtype), tuple(shape), tuple(chunks))
    files = {name: DataFile(rank, nbytes) for name, rank, nbytes in content["files"]}
    rest = {name: content[name] for name in ("time_ns", "world_size", "software", "values", "paths")}
    return Manifest(files=files, entries=entries, **rest)


def dtype_named(name: str) -> torch.dtype:
    """Find a dtype by its name.

    Raises:
        ValueError: this PyTorch has none of that name.
    """
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    raise ValueError(f"this PyTorch has no dtype {name}")


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and see that its data files are there in full length.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, with the reason.
    """
    try:
        manifest = Manifest.from_json((folder / FILE).read_text())
    except FileNotFoundError:
        reason = (
            "it has no manifest, so it was never completed" if folder.is_dir() else "there is no such folder"
        )
        raise CheckpointError(f"no whole checkpoint at {folder}: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / FILE}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{folder / FILE} is damaged or foreign: {error}") from error
    for name, file in manifest.files.items():
        path = folder / name
        nbytes = path.stat().st_size if path.is_file() else None
        if nbytes != file.nbytes:
            got = "it is missing" if nbytes is None else f"it has {nbytes:,} bytes"
            raise CheckpointError(
                f"no whole checkpoint at {folder}: {name} should have {file.nbytes:,} bytes, {got}"
            )
    return manifest


def commit(folder: Path, manifest: Manifest) -> None:
    """Complete a checkpoint, or replace the one that ``folder`` holds, in one atomic step.

    The data files are on the disk already. Whatever ends the process, the folder holds the checkpoint
    before or this one.
    """
    beside = folder / PART
    with beside.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)  # the data files' names
    beside.replace(folder / FILE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
