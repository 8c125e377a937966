"""Data files: the bytes of tensors, one run behind the other, each with a checksum."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_optim.checkpoint.files import open_regular
from zero_optim.checkpoint.manifest import Chunk, blamed_on
from zero_optim.comm.wire import PIECE_NBYTES, memory_of
from zero_optim.errors import CheckpointError
from zero_optim.plan.plan import ALIGNMENT_NBYTES

if TYPE_CHECKING:
    from typing_extensions import Self


def bytes_of(tensor: Tensor) -> memoryview:
    """View a tensor's elements, row after row, as bytes in CPU memory; copies what is not there so."""
    run: Any = memory_of(tensor.detach().cpu().contiguous()).numpy()
    return memoryview(run)


class DataWriter:
    """Writes one data file; it is on the disk when the ``with`` ends, and gone if that fails.

    Args:
        path: of the file, which does not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._file = path.open("xb", buffering=0)

    def __enter__(self) -> "Self":
        """Begin."""
        return self

    def append(self, run: memoryview, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Chunk:
        """Write a run of bytes and give its place."""
        self._write(memoryview(bytes(-self._end % ALIGNMENT_NBYTES)))
        start, checksum = self._end, 0
        for first in range(0, run.nbytes, PIECE_NBYTES):
            piece = run[first : first + PIECE_NBYTES]
            checksum = zlib.crc32(piece, checksum)
            self._write(piece)
        return Chunk(tuple(offsets), tuple(sizes), self._path.name, start, run.nbytes, checksum)

    def _write(self, piece: memoryview) -> None:
        while piece.nbytes:
            written = self._file.write(piece)
            self._end += written
            piece = piece[written:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Bring it to the disk, or remove it."""
        try:
            if error is None:
                os.fsync(self._file.fileno())
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            self._file.close()
            if error is not None:
                self._path.unlink(missing_ok=True)


def read_run(folder: Path, chunk: Chunk, into: memoryview, key: str) -> None:
    """Read a chunk's bytes into memory of the same length, and check them.

    Raises:
        CheckpointError: they are not what was written, or cannot be read.
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

    One chunk of extra memory, unless the whole of it goes into a contiguous CPU tensor of its dtype.

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
    """Read a chunk's bytes for their checksum alone, in bounded memory; raises like `read_run`."""
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


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a contiguous CPU tensor, uninitialised."""
    return torch.empty(shape, dtype=dtype)
