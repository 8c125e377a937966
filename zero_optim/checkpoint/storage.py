"""Writes a rank's data file and the manifest that completes a checkpoint; reads its tensors."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import (
    HeaderChecks,
    bytes_of,
    check_run,
    map_file,
    read_box,
    tensor_in,
    write_data,
)
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, Manifest
from zero_optim.checkpoint.safetensors import Box
from zero_optim.errors import CheckpointError
from zero_optim.plan.pieces import num_rows


def new_token() -> str:
    """Return a random name for a save, so that its files have names of their own."""
    return secrets.token_hex(6)


def data_name(token: str, rank: int) -> str:
    """Name the data file that a rank writes in a save."""
    return f"data-{token}-{rank}.safetensors"


def write_tensors(
    folder: Path, token: str, rank: int, boxes: Sequence[Box], read: Callable[[str], Tensor]
) -> tuple[dict[str, DataFile], list[tuple[Box, Chunk]]]:
    """Write a rank's data file, tensor by tensor; does not communicate.

    Extra memory: one tensor, if it is not contiguous or not on the CPU.

    Args:
        folder: the checkpoint's, which exists.
        token: of this save.
        rank: this rank.
        boxes: of tensors, or of their parts; one for each key. No other rank writes the same elements.
        read: returns the tensor of a key, or the part that is written.

    Returns:
        The file, if there was anything to write, and the places of each box in it.
    """
    if not boxes:
        return {}, []
    name = data_name(token, rank)
    file, chunks = write_data(folder / name, rank, boxes, lambda box: bytes_of(read(box.key)))
    return {name: file}, chunks


def entries_of(written: Iterable[tuple[Box, Chunk]]) -> dict[str, Entry]:
    """Combine what the ranks have written of each tensor.

    Raises:
        ValueError: the parts of a tensor are not all of it.
    """
    found: dict[str, tuple[Box, list[Chunk]]] = {}
    for box, chunk in written:
        found.setdefault(box.key, (box, []))[1].append(chunk)
    return {key: Entry(box.dtype, box.shape, tuple(chunks)) for key, (box, chunks) in found.items()}


def complete(
    folder: Path,
    world_size: int,
    files: Mapping[str, DataFile],
    entries: Mapping[str, Entry],
    values: Mapping[str, Any],
    paths: Mapping[str, list[str | int]],
    *,
    alone: bool = False,
) -> None:
    """Write the manifest, which completes a checkpoint, and remove what it replaces; on one rank.

    The caller holds the folder's lock. The other arguments are those of `Manifest`. If ``alone``, nobody else
    writes to the folder, so unfinished files in it are removed.

    Raises:
        CheckpointError: this rank does not see all data files in full length.
    """
    for name, file in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.nbytes:
            raise CheckpointError(
                f"{folder / name}, which rank {file.rank} has written, cannot be seen whole by the rank that "
                "completes the checkpoint: the folder must be one that all ranks share"
            )
    software = {"zero_optim": folders.library_version(), "torch": str(torch.__version__)}
    number = folders.next_number(folder)
    manifest = Manifest(time.time_ns(), world_size, software, files, entries, values, paths, number)
    try:
        replaced = manifests.parse(folder)
    except CheckpointError:
        replaced = None
    manifests.commit(folder, manifest)
    folders.remove_strays(folder, manifest, replaced, alone=alone)


def discard(folder: Path, token: str, *ranks: int) -> None:
    """Remove the files of a save that failed, as far as possible."""
    names = {data_name(token, rank) for rank in ranks}
    with suppress(OSError):
        if not _is_committed(folder, token):
            for name in names:
                (folder / name).unlink(missing_ok=True)


def _is_committed(folder: Path, token: str) -> bool:
    """Whether the manifest is already renamed into place: then the files stay."""
    try:
        names = manifests.parse(folder).files
    except CheckpointError:
        return False
    return any(name.startswith(f"data-{token}-") for name in names)


Rows = tuple[int, int] | None  # those to read of a tensor, of dimension 0; None for all


class CheckpointReader:
    """Reads tensors of a checkpoint and checks them. Does not communicate.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is incomplete or damaged; also from the methods that read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path).absolute()
        self.manifest = manifests.read(self.folder)
        self._headers = HeaderChecks(self.folder, self.manifest.files)
        self._mapped: dict[str, torch.UntypedStorage] = {}

    @property
    def token(self) -> str:
        """The token of the save, which is in the names of its files; "" if there are none."""
        name = next(iter(self.manifest.files), "")
        return name.partition("-")[2].partition("-")[0]

    def read_tensor(self, key: str, rows: Rows = None) -> Tensor:
        """Read a tensor, or only some of its rows, into CPU memory, contiguous.

        Of what a rank wrote in several blocks, only those with wanted rows are read.
        """
        entry = self.manifest.entries.get(key)
        if entry is None or entry.dtype is None:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: it lacks {key}")
        start, stop = rows or (0, num_rows(entry.shape))
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        tensor = torch.empty(shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            box, inside = tensor, [0] * len(chunk.sizes)
            if chunk.sizes:
                first, end = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
                if first >= end and rows is not None:
                    continue
                box, inside[0] = box[first - start : end - start], first - chunk.offsets[0]
            self._headers.check(chunk.file)
            for dim in range(1, len(chunk.sizes)):
                box = box.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            read_box(self.folder, chunk, key, tensor.dtype, box, inside)
        return tensor

    def map_tensor(self, key: str) -> Tensor:
        """Return a contiguous tensor that is mapped from the file, after checking its checksum.

        Needs only the system's memory for files, unless several ranks wrote parts of the tensor.
        """
        entry = self.manifest.entries.get(key)
        if entry is None or entry.dtype is None or not entry.nbytes or not _is_one_run(entry):
            return self.read_tensor(key)
        for chunk in entry.chunks:
            self._headers.check(chunk.file)
            check_run(self.folder, chunk, key)
        first = entry.chunks[0]
        if first.file not in self._mapped:
            nbytes = self.manifest.files[first.file].nbytes
            self._mapped[first.file] = map_file(self.folder / first.file, nbytes)
        storage = self._mapped[first.file][first.start : first.start + entry.nbytes]
        return tensor_in(storage, entry.dtype, entry.shape)


def _is_one_run(entry: Entry) -> bool:
    """Whether a tensor lies in one run of a file: its chunks are blocks of rows, one behind the other."""
    if len(entry.chunks) == 1:
        return True
    row = 0
    for before, chunk in pairwise((None, *entry.chunks)):
        assert chunk is not None  # only the first of all is
        rest = len(entry.shape) - 1
        if chunk.offsets != (row, *[0] * rest) or chunk.sizes[1:] != entry.shape[1:]:
            return False
        if before is not None and (chunk.file, chunk.start) != (before.file, before.start + before.nbytes):
            return False
        row += chunk.sizes[0]
    return True
