"""The rows of a bucket of gradients, in portions that are sent one after the other. Does not communicate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from zero_optim.compat import streams
from zero_optim.ddp.owners.owner_layout import OwnerLayout, Part

# Smaller portions would save memory that does not matter, and cost messages that do.
LEAST_PORTION_NBYTES = 2**16


def most_portions(size: int) -> int:
    """Return in how many portions the largest bucket is sent, so that two buckets are enough.

    See Note [Memory of sharded gradients] in `owner_bucket`: the smallest c with ``(W - 1) / W (1 + 4 / c) <=
    2``, and at least two, as the last one is under way while the next bucket begins. More would save more,
    and cost time: each is one more wait, for ranks that may be half a bucket behind.

    Args:
        size: number of ranks.
    """
    return -(-4 * (size - 1) // (size + 1)) if size > 1 else 1


def num_portions(nbytes: int, largest_nbytes: int, most: int) -> int:
    """Return in how many portions a bucket is sent: none is larger than those of the largest bucket.

    Args:
        nbytes: of the bucket.
        largest_nbytes: of the largest bucket.
        most: portions of the largest bucket, see `most_portions`.
    """
    wanted = -(-most * nbytes // max(1, largest_nbytes))
    return max(1, min(most, wanted, nbytes // LEAST_PORTION_NBYTES))


@dataclass(frozen=True, slots=True)
class Portions:
    """Rows cut into portions, at about the same places of each: all ranks send and receive equally much.

    A portion ends where a gradient does, or between rows of one whose dimension 0 is outermost in memory.

    Attributes:
        layout: of the rows.
        count: number of portions.
        bounds: by rank, where each portion begins in its row, in elements, and where the last one ends.
        parts: by slot, the number of a portion and what lies in it, with its offset in the portion.
    """

    layout: OwnerLayout
    count: int
    bounds: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[tuple[int, Part], ...], ...]

    @classmethod
    def of(cls, layout: OwnerLayout, count: int) -> "Portions":
        """Cut the rows of a layout into ``count`` portions."""
        bounds, parts = [], [list[tuple[int, Part]]() for _ in layout.parts]
        for rank, length in enumerate(layout.lengths):
            owned = layout.owned_parts(rank)
            inner = [_edge([part for _, part in owned], length * at // count) for at in range(1, count)]
            row = (0, *inner, length + layout.carries_word)
            for slot, part in owned:
                parts[slot] += _pieces(part, row)
            bounds.append(row)
        return cls(layout, count, tuple(bounds), tuple(map(tuple, parts)))

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(row[-1] for row in self.bounds)


def _rows(part: Part) -> tuple[int, int]:
    """Return how many rows a part can be split into, and their length: one, where it cannot be split."""
    numel = _numel(part)
    if numel and part.shape and part.strides[0] * part.shape[0] == numel:
        return part.shape[0], part.strides[0]
    return 1, numel


def _numel(part: Part) -> int:
    numel = 1
    for length in part.shape:
        numel *= length
    return numel


def _edge(parts: Sequence[Part], target: int) -> int:
    """Find the place next to one in a row at which the row may be cut."""
    for part in parts:
        if part.offset < target < part.offset + _numel(part):
            length = _rows(part)[1]
            return part.offset + (target - part.offset + length // 2) // length * length
    return target


def _pieces(part: Part, row: Sequence[int]) -> list[tuple[int, Part]]:
    """Split a part where the row that it lies in is cut; nothing of one without elements."""
    found, length, stop = [], _rows(part)[1], part.offset + _numel(part)
    for number, (begin, end) in enumerate(pairwise(row)):
        low, high = max(part.offset, begin), min(stop, end)
        if low >= high:
            continue
        if high - low == stop - part.offset:
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
        found.append((number, piece))
    return found


class OwnerRows:
    """The rows of a bucket in one backward pass: a row for each rank, in portions.

    The row of this rank is made at once. Of the other ranks' rows each portion is made when the first
    gradient comes into it, and let go when it is popped. If there is one portion, all are made at once, by
    one stream.

    Args:
        portions: of the rows.
        rank: this one.
        like: of the dtype and device of the rows.
        zeros: all elements are zero; otherwise padding is, as it is sent.

    Attributes:
        own: the row of this rank.
    """

    def __init__(self, portions: Portions, rank: int, like: Tensor, *, zeros: bool = False) -> None:
        self._portions = portions
        self._rank = rank
        self._like = like
        self._zeros = zeros or portions.layout.has_gaps
        self.own = self._made(portions.bounds[rank][-1], zeros=self._zeros)
        self._cells: dict[tuple[int, int], Tensor] = {}  # by rank and portion
        if portions.count == 1:
            for owner in range(len(portions.bounds)):
                self._cell(owner, 0)

    def place(self, number: int, part: Part) -> Tensor:
        """View the place of a part of a gradient.

        Args:
            number: of the portion.
            part: as of `Portions`.
        """
        return part.seen_in(self._cell(part.owner, number))

    def pop(self, number: int, *, word: float) -> list[Tensor]:
        """Give a portion of each row, by rank, to be sent; zeros if nothing came. Lets go of other ranks'.

        Args:
            number: of the portion.
            word: written behind the last portion, where the layout has a place for it.
        """
        given = []
        for rank in range(len(self._portions.bounds)):
            cell = self._cells.pop((rank, number), None)
            given.append(self._new_cell(rank, number, zeros=True) if cell is None else cell)
        if self._portions.layout.carries_word and number == self._portions.count - 1:
            for row in given:
                row[-1:].fill_(word)
        streams.record_use(*given)  # perhaps made on the stream of another hook
        return given

    def _cell(self, rank: int, number: int) -> Tensor:
        found = self._cells.get((rank, number))
        if found is None:
            found = self._cells[rank, number] = self._new_cell(rank, number, zeros=self._zeros)
        return found

    def _new_cell(self, rank: int, number: int, *, zeros: bool) -> Tensor:
        start, stop = self._portions.bounds[rank][number : number + 2]
        return self.own[start:stop] if rank == self._rank else self._made(stop - start, zeros=zeros)

    def _made(self, numel: int, *, zeros: bool) -> Tensor:
        return self._like.new_zeros(numel) if zeros else self._like.new_empty(numel)
