"""The header of a safetensors file: names, dtypes, shapes and places of its tensors.

The format: eight bytes with the header's length, the header in JSON, then the tensors' bytes without gaps.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_optim.plan.plan import ALIGNMENT_NBYTES

_LENGTH_NBYTES = 8
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Box:
    """What is written under one name: a tensor, a box of its elements, or bytes.

    Attributes:
        key: of the tensor or the bytes.
        dtype: None for bytes.
        shape: of the whole tensor; the number of bytes.
        offsets, sizes: the box, in elements.
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


def whole(key: str, dtype: torch.dtype | None, shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box(key, dtype, tuple(shape), (0,) * len(shape), tuple(shape))


def rows_box(key: str, dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> Box:
    """Return the box of rows ``[start, stop)`` of dimension 0."""
    rest = tuple(shape[1:])
    return Box(key, dtype, tuple(shape), (start, *(0 for _ in rest)), (stop - start, *rest))


def lay_out(boxes: Iterable[Box]) -> tuple[bytes, list[tuple[Box, int]]]:
    """Choose the place of each box in a file, at a multiple of its element's size.

    A dtype that the format does not know is written as bytes, with one more dimension of the element's size.
    Then ``__metadata__`` has its name under ``dtype of NAME``.

    Returns:
        The header, and the boxes in the order of the file, with the first byte of each.
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
            about[f"dtype of {name}"] = str(box.dtype).removeprefix("torch.")
            sizes.append(box.itemsize)
        kind = "U8" if box.dtype is None else DTYPES.get(box.dtype, "U8")
        header[name] = {"dtype": kind, "shape": sizes, "data_offsets": [end, end + box.nbytes]}
        placed.append((box, end))
        end += box.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % ALIGNMENT_NBYTES)
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return head, [(box, len(head) + start) for box, start in placed]
