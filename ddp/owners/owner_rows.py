"""The rows of gradients that go to owners, in portions sent one after the other. No communication.

Note [Rows of gradients]
    Owners, pieces and alignment are those of the plan, and reduced gradients are views of the owner's row.
    Each rank's row is laid out by itself, as gradients come: the last parameter first. A `Layout` has a cut
    parameter last in one row and first in the next; it also has room for frozen parameters and stamps, which
    would be bytes on the wire. The portion sent last has the word of a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zero_optim.compat import streams
from zero_optim.ddp.owners.bucket_owners import BucketOwners
from zero_optim.plan.layout import rows_apart, spans_of
from zero_optim.plan.pieces import is_whole, piece_of
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES
from zero_optim.plan.strides import dense_strides, in_order_of_memory

# Smaller portions would save memory that does not matter, and cost messages that do.
LEAST_PORTION_NBYTES = 2**16


def most_portions(size: int) -> int:
    """Return in how many portions the largest bucket is sent, so that two buckets are enough.

    The smallest c with ``(W - 1) / W (1 + 4 / c) <= 2``, see Note [Memory of sharded gradients], and at least
    two, as the last one is pending while the next bucket begins. Each more is one more wait.
    """
    return -(-4 * (size - 1) // (size + 1)) if size > 1 else 1


def num_portions(nbytes: int, largest_nbytes: int, most: int) -> int:
    """Return in how many portions a bucket is sent: none is larger than those of the largest bucket."""
    wanted = -(-most * nbytes // max(1, largest_nbytes))
    return max(1, min(most, wanted, nbytes // LEAST_PORTION_NBYTES))


class Cell(NamedTuple):
    """Elements ``[start, stop)`` of a gradient, in the order of its memory, at ``offset`` of a portion."""

    owner: int
    portion: int
    start: int
    stop: int
    offset: int


class View(NamedTuple):
    """Where a gradient, or this rank's rows of it, lies in a 1-D tensor; strides and offset in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def of(self, flat: Tensor) -> Tensor:
        """View it there."""
        return flat.as_strided(self.shape, self.strides, int(flat.storage_offset()) + self.offset)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a bucket of gradients, one for each rank, each cut into ``count`` portions.

    In a row gradients keep the order of the bucket, aligned as parameters are, so that kernels treat them as
    tensors of their own. ``carries_word``: each row has one more element, the last, see `OwnerBucket`.
    """

    forms: tuple[View, ...]  # by slot, the whole gradient
    cells: tuple[tuple[Cell, ...], ...]  # by slot
    owned: tuple[tuple[int, View], ...]  # slots, and where this rank's rows of them lie in its row
    bounds: tuple[tuple[int, ...], ...]  # by rank, where portions begin in its row, and the last one ends
    has_gaps: bool  # there is padding
    carries_word: bool

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        owners: BucketOwners,
        dtype: torch.dtype,
        *,
        carries_word: bool = False,
        count: int = 1,
    ) -> "RowPlan":
        """Lay out the gradients of a bucket, in a dtype."""
        nbytes = ALIGNMENT_NBYTES if params[0].device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
        spans = [spans_of(owned, param.numel()) for owned, param in zip(owners.pieces, params, strict=True)]
        rows = rows_apart(spans, owners.size, max(1, nbytes // dtype.itemsize))
        forms = [View(tuple(param.shape), tuple(dense_strides(param))) for param in params]
        cells, bounds = [list[Cell]() for _ in params], []
        for row in rows:
            edges = [row.stop * number // count for number in range(count)]
            bounds.append((*edges, row.stop + carries_word))
            for extent in row.extents:
                for number, (begin, stop) in enumerate(pairwise(bounds[-1])):
                    low, high = max(extent.offset, begin), min(extent.end, stop)
                    if low < high:
                        first = extent.start + low - extent.offset
                        cell = Cell(row.owner, number, first, first + high - low, low - begin)
                        cells[extent.param].append(cell)
        owned_here = []
        for slot, _, _, offset in rows[owners.rank].extents:
            shape, strides, _ = forms[slot]
            piece = piece_of(owners.pieces[slot], owners.rank)
            assert piece is not None  # it has an extent
            if not is_whole(piece, shape):
                shape = (piece.stop - piece.start, *shape[1:])
            owned_here.append((slot, View(shape, strides, offset)))
        has_gaps = sum(row.stop for row in rows) > sum(param.numel() for param in params)
        return cls(
            tuple(forms), tuple(map(tuple, cells)), tuple(owned_here), tuple(bounds), has_gaps, carries_word
        )

    @property
    def count(self) -> int:
        """How many portions there are."""
        return len(self.bounds[0]) - 1

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(row[-1] for row in self.bounds)


class OwnerRows:
    """The rows of a bucket in one backward pass: ``own`` is that of this rank, made at once.

    Portions of other rows are made when the first gradient comes, and dropped when they are popped; one
    portion at once, by one stream. Padding, which is sent, is zero.
    """

    def __init__(self, plan: RowPlan, rank: int, like: Tensor, *, zeros: bool = False) -> None:
        self._plan = plan
        self._rank = rank
        self._like = like  # has their dtype and device
        self._zeros = zeros or plan.has_gaps
        self.own = self._new(plan.bounds[rank][-1], zeros=self._zeros)
        self._portions: dict[tuple[int, int], Tensor] = {}  # by rank and number
        if plan.count == 1:
            for owner in range(len(plan.bounds)):
                self._portion(owner, 0)
        self._stream, self._made = streams.current_stream(like.device), streams.recorded_event(like.device)

    def join(self) -> None:
        """Let the current stream write here."""
        if self._made is not None and streams.current_stream(self._like.device) != self._stream:
            streams.wait_for_event(self._like.device, self._made)

    def places(self, slot: int, gradient: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield views of the rows where a gradient goes, each with that part of it."""
        cells, form = self._plan.cells[slot], self._plan.forms[slot]
        if len(cells) == 1:
            (cell,) = cells
            yield form._replace(offset=cell.offset).of(self._portion(cell.owner, cell.portion)), gradient
            return
        flat = None if gradient is None else in_order_of_memory(gradient, form.strides)
        for owner, number, start, stop, offset in cells:
            place = self._portion(owner, number)[offset : offset + stop - start]
            yield place, None if flat is None else flat[start:stop]

    def pop(self, number: int, *, word: float) -> list[Tensor]:
        """Return a portion of each row, by rank, to be sent; zeros if nothing came. Drops other ranks'.

        The word is written behind the last portion, where the plan has a place for it.
        """
        rows = []
        for rank in range(len(self._plan.bounds)):
            portion = self._portions.pop((rank, number), None)
            rows.append(self._new_portion(rank, number, zeros=True) if portion is None else portion)
        if self._plan.carries_word and number == self._plan.count - 1:
            for row in rows:
                row[-1:].fill_(word)
        streams.record_use(*rows)  # perhaps made on the stream of another hook
        return rows

    def _portion(self, rank: int, number: int) -> Tensor:
        portion = self._portions.get((rank, number))
        if portion is None:
            portion = self._portions[rank, number] = self._new_portion(rank, number, zeros=self._zeros)
        return portion

    def _new_portion(self, rank: int, number: int, *, zeros: bool) -> Tensor:
        start, stop = self._plan.bounds[rank][number : number + 2]
        return self.own[start:stop] if rank == self._rank else self._new(stop - start, zeros=zeros)

    def _new(self, numel: int, *, zeros: bool) -> Tensor:
        return self._like.new_zeros(numel) if zeros else self._like.new_empty(numel)
