"""Data files: one safetensors file for each rank, with a checksum for every tensor. No communication.

The format: eight bytes with the header's length, the header in JSON, then the tensors' bytes without gaps.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.files import open_regular, write_all
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, blamed_on, dtype_name
from zero_optim.comm.wire import PIECE_NBYTES, memory_of
from zero_optim.errors import CheckpointError
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


@dataclass(frozen=True, slots=True)
class Box:
    """What is written under one key: a tensor of some shape, a box of its elements, or bytes.

    Of bytes the dtype is None, and the shape is their number.
    """

    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.sizes) * self.itemsize

    @property
    def name(self) -> str:
        """The key, with the range of the box if it is not the whole tensor, as in ``weight[0:4,2:8]``."""
        if self.sizes == self.shape:
            return self.key
        ends = zip(self.offsets, self.sizes, strict=True)
        return f"{self.key}[{','.join(f'{first}:{first + size}' for first, size in ends)}]"

    def blocks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Divide by rows: offsets, sizes and bytes of each block that gets a checksum."""
        if self.dtype is None:
            yield (), (), self.nbytes
        elif self.nbytes <= BLOCK_NBYTES:
            yield self.offsets, self.sizes, self.nbytes
        else:
            (first, *offsets), (num_rows, *sizes) = self.offsets, self.sizes
            row_nbytes = self.nbytes // num_rows
            step = max(1, BLOCK_NBYTES // row_nbytes)
            for row in range(0, num_rows, step):
                count = min(step, num_rows - row)
                yield (first + row, *offsets), (count, *sizes), count * row_nbytes


Written = list[tuple[Box, Chunk]]


def whole(key: str, dtype: torch.dtype | None, shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box(key, dtype, tuple(shape), (0,) * len(shape), tuple(shape))


def rows_box(key: str, dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> Box:
    """Return the box of rows ``[start, stop)`` of dimension 0."""
    rest = tuple(shape[1:])
    return Box(key, dtype, tuple(shape), (start, *(0 for _ in rest)), (stop - start, *rest))


def lay_out(boxes: Iterable[Box]) -> tuple[bytes, list[tuple[Box, int]]]:
    """Return a file's header, and the boxes in the file's order, with the first byte of each.

    Each begins at a multiple of its element's size. A dtype that the format lacks is written as bytes, with
    one more dimension of the element's size; ``__metadata__`` has its name (``dtype of NAME``).
    """
    about = {"format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    end, placed = 0, list[tuple[Box, int]]()
    for box in sorted(boxes, key=lambda box: -box.itemsize):  # so that there are no gaps
        name = box.name
        while name in header:  # a whole tensor "w[0:2]" and a box of "w"
            name += "'"
        sizes = list(box.sizes)
        if box.dtype is not None and box.dtype not in DTYPES:
            about[f"dtype of {name}"] = dtype_name(box.dtype)
            sizes.append(box.itemsize)
        kind = "U8" if box.dtype is None else DTYPES.get(box.dtype, "U8")
        header[name] = {"dtype": kind, "shape": sizes, "data_offsets": [end, end + box.nbytes]}
        placed.append((box, end))
        end += box.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % ALIGNMENT_NBYTES)
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return head, [(box, len(head) + start) for box, start in placed]


def bytes_of(tensor: Tensor) -> memoryview:
    """View a tensor's elements, in row-major order, as bytes in CPU memory; copies if necessary."""
    run: Any = memory_of(tensor.detach().cpu().contiguous()).numpy()
    return memoryview(run)


def data_name(token: str, rank: int) -> str:
    """Name the data file that a rank writes in the save of a token."""
    return f"data-{token}-{rank}.safetensors"


def write_tensors(
    folder: Path, token: str, rank: int, boxes: Iterable[Box], read: Callable[[Box], memoryview]
) -> tuple[dict[str, DataFile], Written]:
    """Write a rank's data file in the save of a token, and flush it to the disk; it is removed if this fails.

    Returns the file by name, none without boxes, and the chunks of each box, one behind the other.
    """
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
                for offsets, sizes, nbytes in box.blocks():
                    checksum = _append(file, run[end - start : end - start + nbytes])
                    written.append((box, Chunk(offsets, sizes, path.name, end, nbytes, checksum)))
                    end += nbytes
                del run  # before the next one is read
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return {path.name: DataFile(rank, end, len(head), zlib.crc32(head))}, written


def _append(file: FileIO, run: memoryview) -> int:
    """Write a run of bytes and return its checksum."""
    checksum = 0
    for first in range(0, run.nbytes, PIECE_NBYTES):
        piece = run[first : first + PIECE_NBYTES]
        checksum = zlib.crc32(piece, checksum)
        write_all(file, piece)
    return checksum


def entries_of(written: Iterable[tuple[Box, Chunk]]) -> dict[str, Entry]:
    """Combine what the ranks have written; ValueError if the parts of a tensor are not all of it."""
    chunks: dict[str, tuple[Box, list[Chunk]]] = {}
    for box, chunk in written:
        chunks.setdefault(box.key, (box, []))[1].append(chunk)
    return {
        key: Entry(box.dtype, () if box.dtype is None else box.shape, tuple(parts))
        for key, (box, parts) in chunks.items()
    }


def read_run(folder: Path, chunk: Chunk, key: str, into: memoryview | None = None) -> None:
    """Compare a chunk with its checksum; put its bytes into memory of that length, if some is given."""
    buffer = memoryview(bytearray(min(chunk.nbytes, PIECE_NBYTES))) if into is None else into
    checksum, done = 0, 0
    with blamed_on(folder), open_regular(folder / chunk.file) as file:
        file.seek(chunk.start)
        while done < chunk.nbytes:
            first = 0 if into is None else done
            piece = buffer[first : first + min(PIECE_NBYTES, chunk.nbytes - done)]
            count = file.readinto(piece)
            if not count:
                break
            checksum = zlib.crc32(piece[:count], checksum)
            done += count
    if done != chunk.nbytes or checksum != chunk.crc32:
        reason = "its checksum is wrong" if done == chunk.nbytes else "the file is too short"
        raise CheckpointError(f"the checkpoint {folder} is damaged: {key} in {chunk.file}: {reason}")


def map_file(path: Path, nbytes: int) -> torch.UntypedStorage:
    """Map the first bytes of a file, read when they are used. Changes do not reach the file."""
    storage: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
    mapped: torch.UntypedStorage = storage
    return mapped


def tensor_in(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] = ()
) -> Tensor:
    """Return a tensor that uses a storage as its memory; contiguous if no strides are given."""
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))
