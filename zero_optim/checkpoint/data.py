"""Data files: one safetensors file for each rank, with a checksum for every tensor. No communication."""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.files import open_regular, write_all
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, blamed_on, row_nbytes
from zero_optim.comm.encoding import dtype_name
from zero_optim.comm.wire import memory_of
from zero_optim.errors import CheckpointError
from zero_optim.plan.pieces import num_rows
from zero_optim.plan.plan import ALIGNMENT_NBYTES

# A large tensor has a checksum for each block of rows of about this size. A load that wants some of its rows
# reads at most one block too many at both ends.
BLOCK_NBYTES = 4 * 2**20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
_LENGTH_NBYTES = 8
Rows = tuple[int, int] | None  # of dimension 0 of a tensor; None for all


@dataclass(frozen=True, slots=True)
class Box:
    """Rows of a tensor, maybe all, that are written under one key."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return (self.rows[1] - self.rows[0]) * row_nbytes(self.dtype, self.shape)

    @property
    def name(self) -> str:
        """The key, with the range of rows that are not all, as in ``weight[0:4,0:8]``."""
        if self.rows == (0, num_rows(self.shape)):
            return self.key
        ends = [self.rows, *((0, size) for size in self.shape[1:])]
        return f"{self.key}[{','.join(f'{start}:{stop}' for start, stop in ends)}]"

    def blocks(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the rows and the bytes of each block that gets a checksum."""
        if self.nbytes <= BLOCK_NBYTES:
            yield self.rows, self.nbytes
            return
        (first, last), nbytes = self.rows, row_nbytes(self.dtype, self.shape)
        step = max(1, BLOCK_NBYTES // nbytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            yield (start, stop), (stop - start) * nbytes


Written = list[tuple[Box, Chunk]]
Saved = tuple[dict[str, DataFile], Written]  # data files by name, and the chunks of each box


def box_of(key: str, tensor: Tensor) -> Box:
    """Return the box of a whole tensor."""
    return Box(key, tensor.dtype, tuple(tensor.shape), (0, num_rows(tensor.shape)))


def lay_out(boxes: Iterable[Box]) -> tuple[bytes, list[tuple[Box, int]]]:
    """Return a file's header, and the boxes in order with their first bytes; unknown dtypes become bytes."""
    about = {"format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    end, placed = 0, list[tuple[Box, int]]()
    for box in sorted(boxes, key=lambda box: -box.dtype.itemsize):  # so that there are no gaps
        name = box.name
        while name in header:  # a whole tensor "w[0:2]" and a box of "w"
            name += "'"
        sizes = [box.rows[1] - box.rows[0], *box.shape[1:]] if box.shape else []
        if box.dtype not in DTYPES:
            about[f"dtype of {name}"] = dtype_name(box.dtype)
            sizes.append(box.dtype.itemsize)
        header[name] = {
            "dtype": DTYPES.get(box.dtype, "U8"),
            "shape": sizes,
            "data_offsets": [end, end + box.nbytes],
        }
        placed.append((box, end))
        end += box.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % ALIGNMENT_NBYTES)
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return head, [(box, len(head) + start) for box, start in placed]


def bytes_of(tensor: Tensor) -> memoryview:
    """View a tensor's elements, in row-major order, as bytes in CPU memory, or of a copy."""
    whole = fill(torch.empty_like(tensor, device="cpu"), tensor) if is_lazy(tensor) else tensor
    run: Any = memory_of(whole.detach().cpu().contiguous()).numpy()
    return memoryview(run)


def lazy(dtype: torch.dtype, shape: Sequence[int], fill: Callable[[Tensor], object]) -> Tensor:
    """Stand for a tensor whose values ``fill`` reads into one of any strides."""
    tensor: Any = torch.empty(tuple(shape), dtype=dtype, device="meta")
    tensor.fill_from_file = fill
    return tensor  # type: ignore[no-any-return]


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor stands for another one."""
    return hasattr(tensor, "fill_from_file")


def fill(into: Tensor, tensor: Any) -> Tensor:  # noqa: ANN401 - it has an attribute of ours
    """Copy a tensor, also one that is `lazy`, and return the copy."""
    if is_lazy(tensor):
        tensor.fill_from_file(into)
    else:
        into.copy_(tensor)
    return into


def data_name(token: str, rank: int) -> str:
    """Name the data file that a rank writes in the save of a token."""
    return f"data-{token}-{rank}.safetensors"


def write_tensors(
    folder: Path, token: str, rank: int, boxes: Iterable[Box], read: Callable[[Box], memoryview]
) -> Saved:
    """Write a rank's file and flush it, or remove it; return it by name if any, and each box's chunks."""
    head, placed = lay_out(boxes)
    if not placed:
        return {}, []
    path, written, end = folder / data_name(token, rank), Written(), len(head)
    with path.open("xb", buffering=0) as file:
        try:
            write_all(file, memoryview(head))
            for box, start in placed:
                run = read(box)
                if run.nbytes != box.nbytes:
                    raise ValueError(f"{box.name} should have {box.nbytes:,} bytes, it has {run.nbytes:,}")
                end = start
                for rows, nbytes in box.blocks():
                    block = run[end - start : end - start + nbytes]
                    written.append((box, Chunk(rows, path.name, end, nbytes, zlib.crc32(block))))
                    write_all(file, block)
                    end += nbytes
                del run, block  # before the next one is read
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return {path.name: DataFile(rank, end, len(head), zlib.crc32(head))}, written


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Lay a tensor out with dense strides; copies if it has others."""
    if tensor.stride() == tuple(strides) or tensor.numel() == 0:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)


class CheckpointReader:
    """Reads a checkpoint, compared with its checksums; CheckpointError if incomplete or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifests.read(folder)
        self._headers = dict(self.manifest.files)  # those not yet checked

    def read(self, key: str, chunk: Chunk, into: memoryview | None = None) -> None:
        """Compare a chunk with its checksum, and read its bytes ``into`` memory of that length."""
        whole = self._headers.pop(chunk.file, None)
        if whole is not None:
            self.read("its header", Chunk((0, 0), chunk.file, 0, whole.head_nbytes, whole.head_crc32))
        with blamed_on(self.folder), open_regular(self.folder / chunk.file) as file:
            run, done = memoryview(bytearray(chunk.nbytes) if into is None else into), 0
            file.seek(chunk.start)
            while count := file.readinto(run[done:]):
                done += count
        if done != chunk.nbytes or zlib.crc32(run) != chunk.crc32:
            reason = "its checksum is wrong" if done == chunk.nbytes else "the file is too short"
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: {key} in {chunk.file}: {reason}")

    def check_all(self) -> None:
        """Compare every byte with its checksum; every file has chunks."""
        for key, entry in self.manifest.entries.items():
            for chunk in entry.chunks:
                self.read(key, chunk)

    def read_tensor(self, key: str, rows: Rows = None) -> Tensor:
        """Read a tensor, or the chunks that have some of its rows, into CPU memory, contiguous."""
        entry = self._entry(key)
        shape = entry.shape if rows is None else (rows[1] - rows[0], *entry.shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype, device="cpu")
        self.fill(key, 0 if rows is None else rows[0], tensor)
        return tensor

    def fill(self, key: str, first: int, into: Tensor) -> None:
        """Read rows of a tensor from the ``first``, as many as there is memory for."""
        entry, of_rows = self._entry(key), into if into.dim() else into.view(1)
        last = first + len(of_rows)
        for chunk in entry.chunks:
            start, stop = chunk.rows
            begin, end = max(first, start), min(last, stop)
            rows = of_rows[begin - first : end - first]
            if (begin, end) == (start, stop) and rows.is_contiguous():
                self.read(key, chunk, bytes_of(rows))
            elif begin < end:
                whole = torch.empty((stop - start, *entry.shape[1:]), dtype=entry.dtype, device="cpu")
                self.read(key, chunk, bytes_of(whole))
                rows.copy_(whole[begin - start : end - start])

    def _entry(self, key: str) -> Entry:
        if (entry := self.manifest.entries.get(key)) is None:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: it lacks {key}")
        return entry
