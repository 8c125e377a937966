"""Reads tensors of a checkpoint and checks them. No communication."""

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from zero_optim.checkpoint import data
from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import bytes_of, map_file, tensor_in
from zero_optim.checkpoint.manifest import Chunk, Entry
from zero_optim.errors import CheckpointError
from zero_optim.plan.pieces import num_rows

Rows = tuple[int, int] | None  # those to read of a tensor, of dimension 0; None for all


class CheckpointReader:
    """Reads a checkpoint, and compares what is read with its checksum; the header of its file too, once.

    All raise CheckpointError if the checkpoint is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifests.read(folder)
        self._headers = dict(self.manifest.files)  # those not yet checked
        self._mapped: dict[str, torch.UntypedStorage] = {}

    @property
    def token(self) -> str:
        """The token of the save, which is in the names of its files; "" if there are none."""
        name = next(iter(self.manifest.files), "")
        return name.partition("-")[2].partition("-")[0]

    def check(self, key: str, chunk: Chunk, into: memoryview | None = None) -> None:
        """Compare a chunk with its checksum; put its bytes into memory of that length, if some is given."""
        self._check_header(chunk.file)
        data.read_run(self.folder, chunk, key, into)

    def _check_header(self, name: str) -> None:
        file = self._headers.pop(name, None)
        if file is not None:
            head = Chunk((), (), name, 0, file.head_nbytes, file.head_crc32)
            data.read_run(self.folder, head, "its header")

    def check_all(self) -> None:
        """Compare every byte with its checksum."""
        for name in self.manifest.files:
            self._check_header(name)
        for key, entry in self.manifest.entries.items():
            for chunk in entry.chunks:
                self.check(key, chunk)

    def read_bytes(self, key: str, chunk: Chunk) -> io.BytesIO:
        """Read a chunk of an entry that is not a tensor."""
        buffer = bytearray(chunk.nbytes)
        self.check(key, chunk, memoryview(buffer))
        return io.BytesIO(buffer)

    def read_box(self, key: str, chunk: Chunk, into: Tensor, offsets: Sequence[int]) -> None:
        """Read the box that begins at ``offsets`` inside a chunk into a tensor of the box's shape.

        Needs extra memory for one chunk, unless all of it goes into a contiguous CPU tensor of its dtype.
        """
        dtype, is_all = self._entry(key).dtype, tuple(into.shape) == chunk.sizes
        if is_all and into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous():
            self.check(key, chunk, bytes_of(into))
            return
        box = torch.empty(chunk.sizes, dtype=dtype)
        self.check(key, chunk, bytes_of(box))
        for dim, (start, size) in enumerate(zip(offsets, into.shape, strict=False)):
            box = box.narrow(dim, start, size)
        into.copy_(box)

    def _entry(self, key: str) -> Entry:
        entry = self.manifest.entries.get(key)
        if entry is None or entry.dtype is None:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: it lacks {key}")
        return entry

    def read_tensor(self, key: str, rows: Rows = None) -> Tensor:
        """Read a tensor, or the chunks that have some of its rows, into CPU memory, contiguous."""
        entry = self._entry(key)
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
            for dim in range(1, len(chunk.sizes)):
                box = box.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            self.read_box(key, chunk, box, inside)
        return tensor

    def map_tensor(self, key: str) -> Tensor:
        """Return a contiguous tensor that is mapped from its file, after checking its checksum.

        Needs only the system's memory for files, unless several ranks wrote parts of the tensor.
        """
        entry = self._entry(key)
        if not entry.nbytes or not _is_one_run(entry):
            return self.read_tensor(key)
        for chunk in entry.chunks:
            self.check(key, chunk)
        first = entry.chunks[0]
        if first.file not in self._mapped:
            nbytes = self.manifest.files[first.file].nbytes
            self._mapped[first.file] = map_file(self.folder / first.file, nbytes)
        storage = self._mapped[first.file][first.start : first.start + entry.nbytes]
        assert entry.dtype is not None  # `_entry` has refused bytes
        return tensor_in(storage, entry.dtype, entry.shape)


def _is_one_run(entry: Entry) -> bool:
    """Whether a tensor lies in one run of a file: its chunks are blocks of rows, one behind the other."""
    if len(entry.chunks) == 1:
        return True
    row, rest = 0, entry.shape[1:]
    for chunk in entry.chunks:
        if chunk.offsets != (row, *[0] * len(rest)) or chunk.sizes[1:] != rest:
            return False
        row += chunk.sizes[0]
    return all(
        (chunk.file, chunk.start) == (before.file, before.start + before.nbytes)
        for before, chunk in pairwise(entry.chunks)
    )
