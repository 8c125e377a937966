"""Where gradients lie in the rows that go to owners, in portions sent one after the other. No communication.

Note [Rows of gradients]
    Owners, pieces and alignment are those of the plan, and reduced gradients are views of the owner's row.
    The layout is not `plan.layout`'s: portions go in the order in which gradients come, the last parameter
    first, whereas a layout has a cut parameter last in one row and first in the next; the portion sent last
    has the word of a failure; and room for frozen parameters and stamps would be bytes on the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from zero_optim.compat import streams
from zero_optim.plan.pieces import Pieces, num_rows
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES
from zero_optim.plan.strides import dense_strides

# Smaller portions would save memory that does not matter, and cost messages that do.
LEAST_PORTION_NBYTES = 2**16


def most_portions(size: int) -> int:
    """Return in how many portions the largest bucket is sent, so that two buckets are enough.

    The smallest c with ``(W - 1) / W (1 + 4 / c) <= 2``, see Note [Memory of sharded gradients], and at least
    two, as the last one is under way while the next bucket begins. Each more is one more wait.
    """
    return -(-4 * (size - 1) // (size + 1)) if size > 1 else 1


def num_portions(nbytes: int, largest_nbytes: int, most: int) -> int:
    """Return in how many portions a bucket is sent: none is larger than those of the largest bucket."""
    wanted = -(-most * nbytes // max(1, largest_nbytes))
    return max(1, min(most, wanted, nbytes // LEAST_PORTION_NBYTES))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[start, stop)`` of a gradient, which ``owner`` owns, and their place in its row or a portion.

    ``shape`` and ``strides`` are those of the part in the row, ``offset`` is in elements.
    """

    owner: int
    start: int
    stop: int
    is_whole: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return torch.Size(self.shape).numel()

    def seen_in(self, row: Tensor) -> Tensor:
        """View the part in the row, or portion, of its owner."""
        return row.as_strided(self.shape, self.strides, int(row.storage_offset()) + self.offset)

    def taken_from(self, gradient: Tensor) -> Tensor:
        """View the part in the whole gradient."""
        return gradient if self.is_whole else gradient[self.start : self.stop]

    def splits(self) -> tuple[int, int]:
        """Return how many rows it can be split into, and their length: one, where it cannot be split."""
        if self.numel and self.shape and self.strides[0] * self.shape[0] == self.numel:
            return self.shape[0], self.strides[0]
        return 1, self.numel


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a bucket of gradients, one for each rank, cut into portions at about the same places.

    In a row gradients keep the order of the bucket, aligned as parameters are, so that kernels treat them as
    tensors of their own. A portion ends where a gradient does, or between rows of one whose dimension 0 is
    outermost in memory.
    """

    parts: tuple[tuple[Part, ...], ...]  # by slot, in whole rows
    cells: tuple[tuple[tuple[int, Part], ...], ...]  # by slot, numbers of portions and what lies in them
    bounds: tuple[tuple[int, ...], ...]  # by rank, where portions begin in its row, and the last one ends
    count: int  # of portions
    has_gaps: bool  # there is padding somewhere
    carries_word: bool  # each row has one more element, the last: see `OwnerBucket`

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        pieces: Sequence[Pieces],
        size: int,
        dtype: torch.dtype,
        *,
        carries_word: bool,
        count: int = 1,
    ) -> "RowPlan":
        """Lay out the gradients of a bucket, in a dtype, for so many ranks."""
        nbytes = ALIGNMENT_NBYTES if params[0].device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
        alignment = max(1, nbytes // dtype.itemsize)
        lengths, by_rank = [0] * size, [list[tuple[int, Part]]() for _ in range(size)]
        parts, cells = ([list[Part]() for _ in params], [list[tuple[int, Part]]() for _ in params])
        for slot, (param, owned) in enumerate(zip(params, pieces, strict=True)):
            strides = tuple(dense_strides(param))
            for owner, start, stop in owned:
                is_whole = stop - start == num_rows(param.shape)
                shape = tuple(param.shape) if is_whole else (stop - start, *param.shape[1:])
                offset = -(-lengths[owner] // alignment) * alignment
                part = Part(owner, start, stop, is_whole, shape, strides, offset)
                lengths[owner] = offset + part.numel
                parts[slot].append(part)
                by_rank[owner].append((slot, part))
        bounds = []
        for length, of_rank in zip(lengths, by_rank, strict=True):
            inner = [_edge([part for _, part in of_rank], length * at // count) for at in range(1, count)]
            bounds.append((0, *inner, length + carries_word))
            for slot, part in of_rank:
                cells[slot] += _cut(part, bounds[-1])
        used = sum(part.numel for of_slot in parts for part in of_slot)
        has_gaps = sum(lengths) != used
        every = tuple(map(tuple, parts)), tuple(map(tuple, cells)), tuple(bounds)
        return cls(*every, count, has_gaps, carries_word)

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(row[-1] for row in self.bounds)

    def owned_parts(self, rank: int) -> list[tuple[int, Part]]:
        """List, with its slot, each part that a rank owns."""
        return [(slot, part) for slot, parts in enumerate(self.parts) for part in parts if part.owner == rank]


def _edge(parts: Sequence[Part], target: int) -> int:
    """Find the place next to one in a row at which the row may be cut."""
    for part in parts:
        if part.offset < target < part.offset + part.numel:
            length = part.splits()[1]
            return part.offset + (target - part.offset + length // 2) // length * length
    return target


def _cut(part: Part, row: Sequence[int]) -> list[tuple[int, Part]]:
    """Split a part where the row that it lies in is cut; nothing of one without elements."""
    cells, length, end = [], part.splits()[1], part.offset + part.numel
    for number, (begin, stop) in enumerate(pairwise(row)):
        low, high = max(part.offset, begin), min(end, stop)
        if low >= high:
            continue
        if high - low == part.numel:
            return [(number, replace(part, offset=low - begin))]
        first, last = (low - part.offset) // length, (high - part.offset) // length
        piece = replace(
            part,
            start=part.start + first,
            stop=part.start + last,
            is_whole=False,
            shape=(last - first, *part.shape[1:]),
            offset=low - begin,
        )
        cells.append((number, piece))
    return cells


class OwnerRows:
    """The rows of a bucket in one backward pass: ``own`` is that of this rank, made at once.

    Portions of other rows are made when the first gradient comes, and let go when they are popped; one
    portion at once, by one stream. Padding, which is sent, is zero.
    """

    def __init__(self, plan: RowPlan, rank: int, like: Tensor, *, zeros: bool = False) -> None:
        self._plan = plan
        self._rank = rank
        self._like = like  # has their dtype and device
        self._zeros = zeros or plan.has_gaps
        self.own = self._new(plan.bounds[rank][-1], zeros=self._zeros)
        self._cells: dict[tuple[int, int], Tensor] = {}  # by rank and portion
        if plan.count == 1:
            for owner in range(len(plan.bounds)):
                self._cell(owner, 0)
        self._stream, self._made = streams.current_stream(like.device), streams.recorded_event(like.device)

    def join(self) -> None:
        """Let the current stream write here."""
        if self._made is not None and streams.current_stream(self._like.device) != self._stream:
            streams.wait_for_event(self._like.device, self._made)

    def place(self, number: int, part: Part) -> Tensor:
        """View the place of a part of a gradient, in a portion."""
        return part.seen_in(self._cell(part.owner, number))

    def pop(self, number: int, *, word: float) -> list[Tensor]:
        """Give a portion of each row, by rank, to be sent; zeros if nothing came. Lets go of other ranks'.

        The word is written behind the last portion, where the plan has a place for it.
        """
        portion = []
        for rank in range(len(self._plan.bounds)):
            cell = self._cells.pop((rank, number), None)
            portion.append(self._new_cell(rank, number, zeros=True) if cell is None else cell)
        if self._plan.carries_word and number == self._plan.count - 1:
            for row in portion:
                row[-1:].fill_(word)
        streams.record_use(*portion)  # perhaps made on the stream of another hook
        return portion

    def _cell(self, rank: int, number: int) -> Tensor:
        cell = self._cells.get((rank, number))
        if cell is None:
            cell = self._cells[rank, number] = self._new_cell(rank, number, zeros=self._zeros)
        return cell

    def _new_cell(self, rank: int, number: int, *, zeros: bool) -> Tensor:
        start, stop = self._plan.bounds[rank][number : number + 2]
        return self.own[start:stop] if rank == self._rank else self._new(stop - start, zeros=zeros)

    def _new(self, numel: int, *, zeros: bool) -> Tensor:
        return self._like.new_zeros(numel) if zeros else self._like.new_empty(numel)
