"""Data files: one safetensors file for each rank, with a checksum for every tensor. No communication."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.files import open_regular
from zero_optim.checkpoint.manifest import Chunk, DataFile, blamed_on
from zero_optim.checkpoint.safetensors import Box, lay_out
from zero_optim.comm.wire import PIECE_NBYTES, memory_of
from zero_optim.errors import CheckpointError

# A large tensor has a checksum for each block of rows of about this size. A load that wants some of its rows
# reads at most one block too many at both ends.
BLOCK_NBYTES = 4 * 2**20


def bytes_of(tensor: Tensor) -> memoryview:
    """View a tensor's elements, in row-major order, as bytes in CPU memory; copies if necessary."""
    run: Any = memory_of(tensor.detach().cpu().contiguous()).numpy()
    return memoryview(run)


def write_data(
    path: Path, rank: int, boxes: Iterable[Box], read: Callable[[Box], memoryview]
) -> tuple[DataFile, list[tuple[Box, Chunk]]]:
    """Write a rank's data file. It is flushed to the disk when this returns, and removed if this fails.

    Args:
        path: of the file, which does not exist yet.
        rank: this rank.
        boxes: what to write.
        read: returns the bytes of a box.

    Returns:
        The file, and the places of each box in it: one, or those of its blocks of rows, one behind the other.
    """
    head, placed = lay_out(boxes)
    chunks, end = list[tuple[Box, Chunk]](), len(head)
    with _new_file(path) as file:
        _append(file, memoryview(head))
        for box, start in placed:
            run = read(box)
            if run.nbytes != box.nbytes:
                raise ValueError(f"{box.name} should have {box.nbytes:,} bytes, it has {run.nbytes:,}")
            done = 0
            for offsets, sizes, nbytes in _blocks(box):
                checksum = _append(file, run[done : done + nbytes])
                chunks.append((box, Chunk(offsets, sizes, path.name, start + done, nbytes, checksum)))
                done += nbytes
            end += run.nbytes
            del run  # before the next one is read
    return DataFile(rank, end, len(head), zlib.crc32(head)), chunks


def _blocks(box: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide a box by rows: offsets, sizes and bytes of each block."""
    if box.dtype is None or box.nbytes <= BLOCK_NBYTES:
        place = ((), ()) if box.dtype is None else (box.offsets, box.sizes)
        yield *place, box.nbytes
        return
    (first, *offsets), (num_rows, *sizes) = box.offsets, box.sizes
    row_nbytes = box.nbytes // num_rows
    step = max(1, BLOCK_NBYTES // row_nbytes)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        yield (first + row, *offsets), (count, *sizes), count * row_nbytes


@contextmanager
def _new_file(path: Path) -> Iterator[FileIO]:
    with path.open("xb", buffering=0) as file:
        try:
            yield file
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _append(file: FileIO, run: memoryview) -> int:
    """Write a run of bytes and return its checksum."""
    checksum = 0
    for first in range(0, run.nbytes, PIECE_NBYTES):
        piece = run[first : first + PIECE_NBYTES]
        checksum = zlib.crc32(piece, checksum)
        write_all(file, piece)
    return checksum


def write_all(file: FileIO, run: memoryview) -> None:
    """Write a run of bytes in several calls, since a system call takes at most about 2 GiB."""
    while run.nbytes:
        run = run[file.write(run) :]


def read_run(folder: Path, chunk: Chunk, into: memoryview, key: str) -> None:
    """Read a chunk's bytes into memory of the same length, and check them.

    Raises:
        CheckpointError: they differ from what was written, or cannot be read.
    """
    checksum, done = 0, 0
    try:
        with open_regular(folder / chunk.file) as file:
            file.seek(chunk.start)
            while done < chunk.nbytes:
                count = file.readinto(into[done : done + PIECE_NBYTES])
                if not count:
                    break
                checksum = zlib.crc32(into[done : done + count], checksum)
                done += count
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / chunk.file}: {error.strerror}") from error
    if done != chunk.nbytes or checksum != chunk.crc32:
        reason = "its checksum is wrong" if done == chunk.nbytes else "the file is too short"
        raise CheckpointError(f"the checkpoint {folder} is damaged: {key} in {chunk.file}: {reason}")


def read_box(
    folder: Path, chunk: Chunk, key: str, dtype: torch.dtype, into: Tensor, offsets: Sequence[int] = ()
) -> None:
    """Read a chunk, or the box that begins at ``offsets`` inside it, into a tensor of the box's shape.

    Needs extra memory for one chunk, unless all of it goes into a contiguous CPU tensor of its dtype.

    Raises:
        CheckpointError: as `read_run` does.
    """
    whole = tuple(into.shape) == chunk.sizes
    if whole and into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous():
        read_run(folder, chunk, bytes_of(into), key)
        return
    read = blank(chunk.sizes, dtype)
    read_run(folder, chunk, bytes_of(read), key)
    for dim, (start, size) in enumerate(zip(offsets, into.shape, strict=False)):
        read = read.narrow(dim, start, size)
    into.copy_(read)


def check_run(folder: Path, chunk: Chunk, key: str) -> None:
    """Check the checksum of a chunk's bytes, in bounded memory; raises like `read_run`."""
    buffer = memoryview(bytearray(min(chunk.nbytes, PIECE_NBYTES)))
    checksum = 0
    with blamed_on(folder), open_regular(folder / chunk.file) as file:
        file.seek(chunk.start)
        left = chunk.nbytes
        while left:
            count = file.readinto(buffer[:left])
            if not count:
                break
            checksum = zlib.crc32(buffer[:count], checksum)
            left -= count
    if left or checksum != chunk.crc32:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {key} in {chunk.file}: its checksum is wrong"
        )


class HeaderChecks:
    """Checks the header of each data file once, when something in the file is read. Does not communicate."""

    def __init__(self, folder: Path, files: Mapping[str, DataFile]) -> None:
        self._folder = folder
        self._left = dict(files)

    def check(self, name: str) -> None:
        """Check the header of a file, unless that was done.

        Raises:
            CheckpointError: it differs from what was written, or cannot be read.
        """
        file = self._left.pop(name, None)
        if file is not None:
            head = Chunk((), (), name, 0, file.head_nbytes, file.head_crc32)
            check_run(self._folder, head, "its header")


def map_file(path: Path, nbytes: int) -> torch.UntypedStorage:
    """Map the first ``nbytes`` of a file into memory. The system reads them when they are used.

    Changes of the memory do not change the file.
    """
    storage: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
    mapped: torch.UntypedStorage = storage
    return mapped


def tensor_in(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] = ()
) -> Tensor:
    """Return a tensor that uses a storage as its memory; contiguous if no strides are given."""
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a contiguous CPU tensor, uninitialised."""
    return torch.empty(shape, dtype=dtype)
