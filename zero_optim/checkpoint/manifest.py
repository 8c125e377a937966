"""The manifest: a JSON file that says what a checkpoint holds and where, and completes the checkpoint.

Note [The manifest]
    Two lines of JSON. The first is ``{"format": "zero_optim checkpoint", "version": 2, "crc32": …}``, with
    the CRC-32 of the second line without its line end, and ``number``. The second is an object:

    - ``number`` orders checkpoints beside each other; ``time_ns`` of completion, nanoseconds since 1970;
      ``world_size``; ``software``: versions of ``zero_optim`` and ``torch``
    - ``files``: rows of name, rank, length in bytes, length and CRC-32 of what comes before the first tensor
    - ``entries``: key -> dtype, shape, chunks: offsets and sizes of rows of the tensor, number of the file,
      first byte, length, CRC-32. A chunk is of one rank, and of at most 4 MiB
    - ``values``: key -> packed value; ``paths``: empty

    A packed value is a pair of a kind and a body. ``plain``: a JSON value, or an object of one entry for what
    JSON lacks (``float`` for infinity and NaN, ``complex``, ``bytes`` in hexadecimal, ``dtype``, ``device``).
    ``tensor``: the key of its entry and its strides. ``dict``, ``ordered``, ``counter``: pairs of a plain key
    and a packed value. ``list``, ``tuple``: packed values. ``array`` (numpy): a packed tensor. ``sparse``:
    shape, indices, values. ``subclass``: module and name, attributes, tensor. ``wrapper``: module and name,
    context, shape, strides, pairs of attribute and packed tensor.

    Keys of values: ``model`` (a state dict without wrappers); ``optimizer``, not packed: ``named`` (false if
    names are places, ``#GROUP.PLACE``), ``groups`` (rows of ``names`` and packed ``options``), ``params``
    (name -> dtype and shape, where known); ``optimizer/state/NAME``; ``optimizer/everywhere``: state of no
    parameter; ``scheduler``, ``scaler``, ``extra``; ``random/RANK``: states of ``python``, ``numpy``,
    ``torch``, ``cuda``. A tensor's key starts with that of its value; parts are separated by ``/`` and
    percent-encoded.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from zero_optim.checkpoint.files import open_regular, replacing, sync_folder, write_all
from zero_optim.comm.encoding import dtype_name, dtype_named
from zero_optim.errors import CheckpointError, ZeroOptimError, message_of
from zero_optim.plan.pieces import num_rows

FILE = "manifest.json"
FORMAT = "zero_optim checkpoint"
VERSION = 2
DATA_FILE = re.compile(r"data-[0-9a-f]+-[0-9]+\.safetensors")
_HEAD_NBYTES = 4096  # at most, with the line end
MAX_INT = 2**63 - 1


def _check_numbers(what: str, numbers: tuple[Any, ...]) -> None:
    """Refuse what is not an integer of at least 0. JSON has fractions, and Python's bools count as ints."""
    wrong = [n for n in numbers if type(n) is not int or not 0 <= n <= MAX_INT]
    if wrong:
        raise ValueError(f"expected {what} to be a whole number from 0, got {wrong[0]!r}")


def row_nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a row of a tensor."""
    return math.prod(shape[1:]) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``[start, stop)`` of a tensor in one run of bytes of a file; (0, 1) if it has no dimensions."""

    rows: tuple[int, int]
    file: str
    start: int
    nbytes: int
    crc32: int

    def __post_init__(self) -> None:
        """Prove that they are numbers."""
        _check_numbers("the place of a chunk", (*self.rows, self.start, self.nbytes, self.crc32))


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor, in chunks that together hold all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        """Check that the runs have the length of their rows, and that the rows fill the tensor."""
        _check_numbers("a shape", self.shape)
        nbytes, total = row_nbytes(self.dtype, self.shape), 0
        for chunk in self.chunks:
            start, stop = chunk.rows
            if not start <= stop <= num_rows(self.shape) or chunk.nbytes != (stop - start) * nbytes:
                raise ValueError(
                    f"a chunk of rows {start} to {stop} in {chunk.nbytes} bytes of shape {self.shape}"
                )
            total += stop - start
        if total != num_rows(self.shape):
            raise ValueError(f"the chunks of a tensor of shape {self.shape} do not have as many rows as it")


def _place(shape: Sequence[int], rows: tuple[int, int]) -> list[list[int]]:
    """Return offsets and sizes of rows."""
    return [[rows[0], *[0] * (len(shape) - 1)], [rows[1] - rows[0], *shape[1:]]] if shape else [[], []]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of tensors: the rank that wrote it, its length, and its header."""

    rank: int
    nbytes: int
    head_nbytes: int
    head_crc32: int

    def __post_init__(self) -> None:
        """Prove that they are numbers."""
        _check_numbers("the place of a file's tensors", astuple(self))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint: Note [The manifest]; `checkpoint.values` packs the values."""

    time_ns: int
    world_size: int
    software: Mapping[str, str]
    files: Mapping[str, DataFile]
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    number: int = 0

    def __post_init__(self) -> None:
        """Check all types, and that every chunk is inside a file of this checkpoint."""
        _check_numbers("time, ranks and number", (self.time_ns, self.world_size, self.number))
        for table in (self.software, self.values):
            if not isinstance(table, dict):
                raise ValueError(f"expected an object, got {type(table).__name__}")  # noqa: TRY004 - of a file
        if not all(isinstance(value, str) for value in self.software.values()):
            raise ValueError("expected versions to be text")
        for name in self.files:
            if not DATA_FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a data file")
        for key, entry in self.entries.items():
            for chunk in entry.chunks:
                file = self.files.get(chunk.file, DataFile(0, 0, 0, 0))
                if not file.head_nbytes <= chunk.start <= file.nbytes - chunk.nbytes:
                    raise ValueError(f"{key} lies outside {chunk.file}")

    def to_json(self) -> str:
        """Write as JSON with a checksum. The first line has the number too, for `number_in`."""
        names = {name: number for number, name in enumerate(self.files)}
        entries = {}
        for key, entry in self.entries.items():
            chunks = [[*_place(entry.shape, c.rows), names[c.file], *astuple(c)[2:]] for c in entry.chunks]
            entries[key] = [dtype_name(entry.dtype), entry.shape, chunks]
        content = {
            "number": self.number,
            "time_ns": self.time_ns,
            "world_size": self.world_size,
            "software": dict(self.software),
            "files": [[name, *astuple(file)] for name, file in self.files.items()],
            "entries": entries,
            "values": dict(self.values),
            "paths": {},
        }
        text = json.dumps(content, separators=(",", ":"))
        return f"{_head_line(text, self.number)}\n{text}\n"

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Read what `to_json` wrote, in this version; ValueError if it is anything else."""
        head_line, _, body = text.partition("\n")
        head = _head_of(head_line)
        if head["version"] != VERSION:
            raise ValueError(
                f"its format has version {head['version']}, and this zero_optim reads version {VERSION}: "
                "read it with the zero_optim that wrote it"
            )
        body = body.removesuffix("\n")
        if zlib.crc32(body.encode()) != head["crc32"]:
            raise ValueError("its checksum is wrong")
        if len(body) > 2**20 and body.count("[") + body.count("{") > len(body) // 5:
            raise ValueError("it has too many empty lists, which would fill the memory")
        content = json.loads(body)
        if _head_line(body, content["number"]) != head_line:
            raise ValueError("its first line does not belong to the second")
        names, entries = [name for name, *_ in content["files"]], {}
        for key, (dtype, shape, parts) in content["entries"].items():
            chunks = []
            for each in parts:
                (start, *_), (number, *_) = each[:2] if shape else ([0], [1])
                rows = start, start + number
                if _place(shape, rows) != each[:2]:  # others than whole rows
                    raise ValueError(f"a chunk at {each[0]} of {each[1]} in a tensor of shape {shape}")
                chunks.append(Chunk(rows, names[each[2]], *each[3:]))
            entries[key] = Entry(dtype_named(dtype), tuple(shape), tuple(chunks))
        files = {name: DataFile(*numbers) for name, *numbers in content["files"]}
        fields = ["time_ns", "world_size", "software", "values", "number"]
        return Manifest(files=files, entries=entries, **{name: content[name] for name in fields})


def _head_line(text: str, number: int) -> str:
    checksum = zlib.crc32(text.encode())
    return json.dumps({"format": FORMAT, "version": VERSION, "crc32": checksum, "number": number})


def _head_of(line: str | bytes) -> dict[str, Any]:
    head = json.loads(line)
    if isinstance(head, dict) and head.get("format") == FORMAT:
        return head
    raise ValueError("it is no manifest of zero_optim")


@contextmanager
def blamed_on(folder: Path, what: str = "the checkpoint ") -> Iterator[None]:
    """Turn every error but our own into a `CheckpointError`: content may be wrong, and raise anything."""
    try:
        yield
    except ZeroOptimError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{what}{folder} is damaged or foreign: {kind}{message_of(error)}") from error


def parse(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, without its data files; CheckpointError with the reason."""
    with blamed_on(folder / FILE, ""):
        try:
            file = open_regular(folder / FILE)
        except (FileNotFoundError, NotADirectoryError):
            reason = "there is no such folder"
            if folder.is_dir():
                reason = "it has no manifest, so it was never completed"
            if folder.is_file():
                reason = "it is a file, for torch.load; zero-optim convert makes a checkpoint of it"
            if any(folder.glob(f"*/{FILE}")):
                reason = f'there are checkpoints in it: load checkpoint.latest("{folder}"), or one of them'
            raise CheckpointError(f"no whole checkpoint at {folder}: {reason}") from None
        with file:
            head = file.readline(_HEAD_NBYTES)
            _head_of(head)  # nothing more is read of a file that is not ours
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > 2**30:  # a million tensors take a fifth of that
                raise ValueError(f"it has {nbytes:,} bytes")
            return Manifest.from_json((head + file.readall()).decode())


def number_in(folder: Path) -> int:
    """Read the number of a checkpoint, complete or not, from one short line; 0 if there is none."""
    try:
        with open_regular(folder / FILE) as file:
            number = _head_of(file.readline(_HEAD_NBYTES))["number"]
        _check_numbers("a number", (number,))
    except (OSError, ValueError, KeyError, RecursionError):
        return 0
    return int(number)


def read(folder: Path) -> Manifest:
    """Read the manifest as `parse` does, and check that its data files exist in full length."""
    return _checked(folder, parse(folder))


def _checked(folder: Path, manifest: Manifest) -> Manifest:
    for name, file in manifest.files.items():
        with blamed_on(folder):
            path = folder / name
            nbytes = path.stat().st_size if path.is_file() else None
        if nbytes != file.nbytes:
            got = "it is missing" if nbytes is None else f"it has {nbytes:,} bytes"
            raise CheckpointError(
                f"no whole checkpoint at {folder}: {name} should have {file.nbytes:,} bytes, {got}"
            )
    return manifest


def commit(folder: Path, manifest: Manifest) -> None:
    """Complete a checkpoint whose data files are on the disk, in one step."""
    with replacing(folder / FILE) as file:
        write_all(file, memoryview(manifest.to_json().encode()))
        sync_folder(folder)  # the data files' names
        _checked(folder, manifest)  # at the last moment before what was there is replaced
