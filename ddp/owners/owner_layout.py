"""Where gradients lie in the rows that go to owners. Arithmetic and views; does not communicate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.plan.memory import dense_strides
from zero_optim.plan.pieces import Pieces, num_rows
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[start, stop)`` of a gradient, and their place in the row of the rank that owns them.

    Attributes:
        owner: the rank.
        start: first of the rows, of dimension 0.
        stop: behind the last one.
        is_whole: these are all rows.
        shape: of the part.
        strides: of the part, in the row.
        offset: of its first element in the row.
    """

    owner: int
    start: int
    stop: int
    is_whole: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def seen_in(self, row: Tensor) -> Tensor:
        """View the part in the row of its owner."""
        return row.as_strided(self.shape, self.strides, int(row.storage_offset()) + self.offset)

    def taken_from(self, gradient: Tensor) -> Tensor:
        """View the part in the whole gradient."""
        return gradient if self.is_whole else gradient[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class OwnerLayout:
    """The rows of a bucket of gradients, one for each rank, and where the gradients lie in them.

    In a row gradients keep the order of the bucket. They begin at multiples of the alignment that
    parameters have too, so that kernels treat them as they treat tensors of their own.

    Attributes:
        parts: by slot, those of the gradient.
        lengths: by rank, elements of its row, without the word.
        has_gaps: there is padding somewhere.
        carries_word: each row has one more element, the last: see `OwnerBucket`.
    """

    parts: tuple[tuple[Part, ...], ...]
    lengths: tuple[int, ...]
    has_gaps: bool
    carries_word: bool

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        pieces: Sequence[Pieces],
        size: int,
        dtype: torch.dtype,
        *,
        carries_word: bool,
    ) -> "OwnerLayout":
        """Lay out a bucket.

        Args:
            params: of the bucket.
            pieces: of each, who owns which rows.
            size: number of ranks.
            dtype: in which gradients travel.
            carries_word: see `OwnerLayout`.
        """
        nbytes = ALIGNMENT_NBYTES if params[0].device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
        alignment = max(1, nbytes // dtype.itemsize)
        lengths, used, parts = [0] * size, 0, []
        for param, owned in zip(params, pieces, strict=True):
            strides, of_param = dense_strides(param), []
            for owner, start, stop in owned:
                is_whole = stop - start == num_rows(param.shape)
                shape = tuple(param.shape) if is_whole else (stop - start, *param.shape[1:])
                offset = -(-lengths[owner] // alignment) * alignment
                of_param.append(Part(owner, start, stop, is_whole, shape, tuple(strides), offset))
                numel = torch.Size(shape).numel()
                lengths[owner] = offset + numel
                used += numel
            parts.append(tuple(of_param))
        return cls(tuple(parts), tuple(lengths), sum(lengths) != used, carries_word)

    def owned_parts(self, rank: int) -> list[tuple[int, Part]]:
        """List, with its slot, each part that a rank owns."""
        return [(slot, part) for slot, parts in enumerate(self.parts) for part in parts if part.owner == rank]
