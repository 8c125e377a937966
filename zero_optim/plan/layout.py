"""The position of each parameter in a bucket's flat tensor, and each rank's row of it. No torch.

flat    | 1 1 1 1 . | 0 0 2 2 2 2 |      rank 0 owns parameter 1, rank 1 owns 0 and 2; "." is padding
rows    '---rank 0--'----rank 1---'
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from zero_optim.plan.pieces import Piece, Pieces, num_rows


class Extent(NamedTuple):
    """Elements ``[start, stop)`` of the bucket's parameter ``param``, at ``offset`` of the flat tensor."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """The end offset in the flat tensor, in elements."""
        return self.offset + self.stop - self.start


class Row(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor, owned by ``owner``."""

    owner: int
    start: int
    stop: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one bucket, by rising rank, with every element once."""

    numels: tuple[int, ...]
    rows: tuple[Row, ...]
    padding: int = 0  # elements behind all rows

    def __post_init__(self) -> None:
        """Check the layout."""
        end, owner = 0, -1
        behind: dict[int, tuple[int, int]] = {}  # of a parameter: its elements so far, the offset after them
        for row in self.rows:
            assert row.owner > owner, f"expected rows by rising rank, got rank {row.owner} behind {owner}"
            assert row.start == end <= row.stop, f"expected a row that starts at {end}, got {row}"
            at = row.start
            for extent in row.extents:
                expected = behind.get(extent.param, (0, extent.offset))
                assert (extent.start, extent.offset) == expected, f"expected {expected}, got {extent}"
                assert at <= extent.offset <= extent.end, f"{extent} overlaps what lies before it in {row}"
                at = extent.end
                behind[extent.param] = extent.stop, at
            assert at <= row.stop, f"the extents of {row} end at {at}"
            assert len({extent.param for extent in row.extents}) == len(row.extents), f"{row} has one twice"
            end, owner = row.stop, row.owner
        counts = tuple(behind.get(param, (0, 0))[0] for param in range(len(self.numels)))
        assert counts == self.numels, f"{counts} elements of {self.numels} have a place"

    @property
    def numel(self) -> int:
        """Elements of the flat tensor with padding."""
        return self.padding + (self.rows[-1].stop if self.rows else 0)

    def offsets(self) -> list[int]:
        """Return each parameter's offset in the flat tensor."""
        # The first extent of a cut parameter comes last here.
        first = {extent.param: extent.offset for row in self.rows[::-1] for extent in row.extents[::-1]}
        return [first[param] for param in range(len(self.numels))]

    def pieces(self, shapes: Sequence[Sequence[int]]) -> list[Pieces]:
        """Return each parameter's pieces."""
        pieces: list[list[Piece]] = [[] for _ in self.numels]
        for row in self.rows:
            for param, start, stop, _ in row.extents:
                rows, numel = num_rows(shapes[param]), self.numels[param]
                is_all = stop - start == numel  # also of an empty one
                first, last = (0, rows) if is_all else (start * rows // numel, stop * rows // numel)
                pieces[param].append(Piece(row.owner, first, last))
        return list(map(tuple, pieces))


def aligned(count: int, alignment: int) -> int:
    """Round elements up to a multiple of the alignment."""
    return -(-count // alignment) * alignment


def aligned_offsets(numels: Iterable[int], alignment: int = 1) -> list[int]:
    """Return the aligned offsets of consecutive parameters, then the end."""
    return list(accumulate((aligned(numel, alignment) for numel in numels), initial=0))


def whole(numels: Sequence[int], owners: Sequence[int], alignment: int = 1) -> Layout:
    """Lay out a bucket without cuts, by the owner of each parameter; they keep their order in a row."""
    order = sorted(range(len(numels)), key=owners.__getitem__)
    offsets = aligned_offsets((numels[param] for param in order), alignment)
    rows, places = [], zip(order, pairwise(offsets), strict=True)
    for owner, of_owner in groupby(places, key=lambda place: owners[place[0]]):
        members = list(of_owner)
        extents = tuple(Extent(param, 0, numels[param], start) for param, (start, _) in members)
        rows.append(Row(owner, extents[0].offset, members[-1][1][1], extents))
    return Layout(tuple(numels), tuple(rows))


def rows_in_order(
    numels: Sequence[int], owners: Sequence[int], ends: Sequence[int], alignment: int = 1
) -> tuple[Row, ...]:
    """Make rows of consecutive parameters, which may end inside one; owners and end offsets rise."""
    offsets = aligned_offsets(numels, alignment)
    rows: list[Row] = []
    param, start = 0, 0
    for owner, stop in zip(owners, ends, strict=True):
        extents = []
        while param < len(numels) and (offsets[param] < stop or stop == ends[-1]):
            first = max(start - offsets[param], 0)
            last = min(numels[param], stop - offsets[param])
            extents.append(Extent(param, first, last, offsets[param] + first))
            if last < numels[param]:
                break  # the next row goes on with it
            param += 1
        rows.append(Row(owner, start, stop, tuple(extents)))
        start = stop
    return tuple(rows)


def rows_apart(pieces: Sequence[Pieces], numels: Sequence[int], alignment: int = 1) -> list[Row]:
    """Lay out a row for each owner, which begins at 0, from each parameter's pieces in order; by rank."""
    by_rank: dict[int, list[Extent]] = {}
    for param, (of_param, numel) in enumerate(zip(pieces, numels, strict=True)):
        in_row = numel // max(1, of_param[-1].stop)
        for owner, start, stop in of_param:
            row = by_rank.setdefault(owner, [])
            offset = aligned(row[-1].end, alignment) if row else 0
            row.append(Extent(param, start * in_row, stop * in_row, offset))
    return [Row(rank, 0, row[-1].end, tuple(row)) for rank, row in sorted(by_rank.items())]
