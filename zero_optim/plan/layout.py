"""The position of each parameter in a bucket's flat tensor, and each rank's row of it. No torch.

    flat    | 1 1 1 1 . | 0 0 2 2 2 2 |      rank 0 owns parameter 1, rank 1 owns 0 and 2; "." is padding
    rows    '---rank 0--'----rank 1---'

``rooms``: header space for a stamp, in a row's padding or behind all rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
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

    def within(self, start: int, stop: int) -> Iterator[Extent]:
        """Yield the parts of extents in ``[start, stop)`` of the flat tensor."""
        for extent in self.extents:
            low, high = max(extent.offset, start), min(extent.end, stop)
            if low < high:
                first = extent.start + low - extent.offset
                yield Extent(extent.param, first, first + high - low, low)


class Span(NamedTuple):
    """Elements ``[start, stop)`` of a flat tensor or a parameter, owned or sent by ``owner``."""

    owner: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one bucket; ValueError with the place if they are inconsistent.

    Extents hold every element once, inside their rows, which adjoin by rising rank. A parameter's extents
    adjoin, at most one for a rank (``is_cut``: several). Header spaces rise by rank, at most one in a row,
    then those behind.
    """

    numels: tuple[int, ...]
    rows: tuple[Row, ...]
    rooms: tuple[Span, ...] = ()
    is_cut: bool = field(init=False)
    rooms_behind: tuple[Span, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the layout."""
        num_extents = sum(len(row.extents) for row in self.rows)
        object.__setattr__(self, "is_cut", num_extents > len(self.numels))
        behind = tuple(room for room in self.rooms if room.start >= self.end_of_rows)
        object.__setattr__(self, "rooms_behind", behind)
        self._prove_rows()
        self._prove_rooms()

    @property
    def numel(self) -> int:
        """Elements of the flat tensor with padding and header space."""
        return self.rooms_behind[-1].stop if self.rooms_behind else self.end_of_rows

    @property
    def end_of_rows(self) -> int:
        """The end of the last row."""
        return self.rows[-1].stop if self.rows else 0

    def spans(self) -> list[Span]:
        """List what owners send: nonempty rows, then header space behind them."""
        rows = [Span(row.owner, row.start, row.stop) for row in self.rows if row.stop > row.start]
        return [*rows, *self.rooms_behind]

    def offsets(self) -> list[int]:
        """Return each parameter's offset in the flat tensor."""
        first: dict[int, int] = {}  # the extents of a cut parameter follow each other
        for row in self.rows:
            for extent in row.extents:
                first.setdefault(extent.param, extent.offset)
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

    def _prove_rows(self) -> None:
        end, owner = 0, -1
        covered = [0] * len(self.numels)
        ends: dict[int, int] = {}  # of each parameter's last extent, in the flat tensor
        for row in self.rows:
            if row.start != end or row.stop < row.start:
                raise ValueError(
                    f"row of rank {row.owner} is [{row.start}, {row.stop}), expected to start at {end}"
                )
            if row.owner <= owner:
                raise ValueError(f"expected rows by rising rank, got rank {row.owner} behind {owner}")
            at = row.start
            for extent in row.extents:
                if extent.offset < at or extent.stop < extent.start:
                    raise ValueError(f"{extent} overlaps what lies before it in the row of rank {row.owner}")
                self._prove_next(extent, covered[extent.param], ends.get(extent.param))
                at = ends[extent.param] = extent.end
                covered[extent.param] = extent.stop
            if at > row.stop:
                raise ValueError(
                    f"the extents of rank {row.owner} end at {at}, behind its row's end {row.stop}"
                )
            if len({extent.param for extent in row.extents}) < len(row.extents):
                raise ValueError(f"rank {row.owner} has two extents of one parameter")
            end, owner = row.stop, row.owner
        for param, (got, numel) in enumerate(zip(covered, self.numels, strict=True)):
            if got != numel:
                raise ValueError(
                    f"parameter {param} of the bucket: {got} of its {numel} elements have a place"
                )

    def _prove_next(self, extent: Extent, start: int, offset: int | None) -> None:
        if extent.start != start:
            raise ValueError(
                f"parameter {extent.param} of the bucket: expected its next extent to start at {start}, got "
                f"{extent.start}"
            )
        if offset is not None and extent.offset != offset:
            raise ValueError(
                f"parameter {extent.param} of the bucket: expected its extents to follow each other, but one "
                f"ends at {offset} and the next begins at {extent.offset}"
            )

    def _prove_rooms(self) -> None:
        rows = {row.owner: row for row in self.rows}
        end = self.end_of_rows
        for room in self.rooms_behind:
            if room.start < end or room.stop <= room.start:
                raise ValueError(f"{room} overlaps what ends at {end}")
            end = room.stop
        for room in self.rooms[: len(self.rooms) - len(self.rooms_behind)]:
            row = rows[room.owner]
            inside = row.start <= room.start < room.stop <= row.stop
            if not inside or any(e.offset < room.stop and room.start < e.end for e in row.extents):
                raise ValueError(f"{room} is not in the padding of the row of rank {row.owner}")


def aligned(count: int, alignment: int) -> int:
    """Round elements up to a multiple of the alignment."""
    return -(-count // alignment) * alignment


def whole(numels: Sequence[int], owners: Sequence[int], alignment: int = 1) -> Layout:
    """Lay out a bucket without cuts, by the owner of each parameter.

    Parameters keep their order in a row; extents and rows start at multiples of ``alignment`` elements.
    """
    by_owner: dict[int, list[int]] = {}
    for param, (_, owner) in enumerate(zip(numels, owners, strict=True)):
        by_owner.setdefault(owner, []).append(param)
    rows: list[Row] = []
    offset = 0
    for owner in sorted(by_owner):
        start, extents = offset, []
        for param in by_owner[owner]:
            extents.append(Extent(param, 0, numels[param], offset))
            offset += aligned(numels[param], alignment)
        rows.append(Row(owner, start, offset, tuple(extents)))
    return Layout(tuple(numels), tuple(rows))


def spans_of(pieces: Pieces, numel: int) -> list[Span]:
    """Return a parameter's elements of each rank."""
    in_row = numel // max(1, pieces[-1].stop)
    return [Span(owner, start * in_row, stop * in_row) for owner, start, stop in pieces]


def rows_apart(spans: Iterable[Sequence[Span]], num_ranks: int, alignment: int = 1) -> list[Row]:
    """Lay out a row for each rank, which begins at 0, from each parameter's spans in order."""
    by_rank: list[list[Extent]] = [[] for _ in range(num_ranks)]
    for param, of_param in enumerate(spans):
        for owner, start, stop in of_param:
            row = by_rank[owner]
            offset = aligned(row[-1].end, alignment) if row else 0
            row.append(Extent(param, start, stop, offset))
    return [Row(rank, 0, row[-1].end if row else 0, tuple(row)) for rank, row in enumerate(by_rank)]


def aligned_offsets(numels: Iterable[int], alignment: int = 1) -> list[int]:
    """Return the aligned offsets of consecutive parameters, then the end."""
    return list(accumulate((aligned(numel, alignment) for numel in numels), initial=0))


def rows_in_order(
    numels: Sequence[int], owners: Sequence[int], ends: Sequence[int], alignment: int = 1
) -> tuple[Row, ...]:
    """Make rows of consecutive parameters, which may end inside one; owners and end offsets rise."""
    offsets = aligned_offsets(numels, alignment)
    rows: list[Row] = []
    param, start = 0, 0
    for number, (owner, stop) in enumerate(zip(owners, ends, strict=True)):
        extents = []
        is_last = number == len(ends) - 1
        while param < len(numels) and (offsets[param] < stop or is_last):
            first = max(start - offsets[param], 0)
            last = min(numels[param], stop - offsets[param])
            extents.append(Extent(param, first, last, offsets[param] + first))
            if last < numels[param]:
                break  # the next row goes on with it
            param += 1
        rows.append(Row(owner, start, stop, tuple(extents)))
        start = stop
    return tuple(rows)


def with_rooms(layout: Layout, length: int, alignment: int = 1) -> Layout:
    """Add header space of ``length`` elements to rows, except empty rows and those within one parameter.

    It uses padding if enough; else the row grows by multiples of the alignment.
    """
    rows: list[Row] = []
    rooms: list[Span] = []
    shift = 0
    for row in layout.rows:
        number, is_behind = _place_for_room(row, layout.numels, length)
        start, extents = row.start + shift, []
        for index, extent in enumerate(row.extents):
            if index == number and not is_behind:
                begin = extent.offset + shift
                rooms.append(Span(row.owner, begin, begin + length))
                shift += aligned(length, alignment)
            extents.append(extent._replace(offset=extent.offset + shift))
            if index == number and is_behind:
                end = extents[-1].end
                rooms.append(Span(row.owner, end, end + length))
                shift += aligned(max(0, length - _gap_behind(row, index)), alignment)
        rows.append(Row(row.owner, start, row.stop + shift, tuple(extents)))
    return Layout(layout.numels, tuple(rows), tuple(rooms))


def with_rooms_behind(layout: Layout, owners: Sequence[int], length: int, alignment: int = 1) -> Layout:
    """Add header space behind the rows, for ranks without any."""
    size = aligned(length, alignment)
    starts = (layout.end_of_rows + size * number for number in range(len(owners)))
    behind = [Span(owner, start, start + length) for owner, start in zip(owners, starts, strict=True)]
    return Layout(layout.numels, layout.rows, (*layout.rooms, *behind))


def _place_for_room(row: Row, numels: Sequence[int], length: int) -> tuple[int, bool]:
    """Return the extent next to the header space (-1: none), and whether the space follows it."""
    filled = [(number, extent) for number, extent in enumerate(row.extents) if extent.stop > extent.start]
    behind = [number for number, extent in filled if extent.stop == numels[extent.param]]
    if behind:
        padded = [number for number in behind if _gap_behind(row, number) >= length]
        return (padded or behind)[-1], True
    return next((number for number, extent in filled if extent.start == 0), -1), False


def _gap_behind(row: Row, number: int) -> int:
    behind = row.extents[number + 1].offset if number + 1 < len(row.extents) else row.stop
    return behind - row.extents[number].end
