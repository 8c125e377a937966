"""Where each parameter lies in a bucket's flat tensor. Pure arithmetic, no torch; called to plan buckets.

A bucket of three parameters on two ranks, parameter 1 owned by rank 0, the others by rank 1::

    flat    | 1 1 1 1 . | 0 0 2 2 2 2 |      "." is padding that aligns the next extent
    rows    '---rank 0--'----rank 1---'

Rows are in rank order. A row may have a *room*: elements between parameters for what travels with the row,
see `plan.rooms`. Rooms of ranks without such a row may lie behind the rows. A rank
that owns nothing in the bucket has no row, so the size of a layout does not grow with the number of ranks,
but for such rooms. A parameter may cross rows, as `rows_in_order` lays it out: its extents follow each other
without a gap, so that it is one contiguous tensor, of which several ranks own a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from zero_optim.plan.pieces import Piece, Pieces, num_rows


class Extent(NamedTuple):
    """Elements ``[start, stop)`` of parameter ``param``, at ``offset`` of the flat tensor.

    ``param`` is an index within the bucket. All other numbers are in elements.
    """

    param: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """Where the extent ends in the flat tensor, in elements."""
        return self.offset + self.stop - self.start


class Row(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor: the part that ``owner`` owns."""

    owner: int
    start: int
    stop: int
    extents: tuple[Extent, ...]


class Room(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor, beside an extent of ``param`` in the row of ``owner``.

    Whatever is sent of that extent is sent with the room. A room behind the rows is sent by itself, by its
    owner, whenever ``param`` is sent.
    """

    owner: int
    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one bucket, checked when the object is made.

    The extents hold every element of every parameter exactly once. They do not overlap, and each lies
    inside its row. The rows follow each other without gaps, in rank order. A rank has at most one extent of
    a parameter, and the extents of a parameter follow each other without gaps.

    Args:
        numels: elements of each parameter of the bucket.
        rows: one row for each rank that owns anything, by rising rank.
        rooms: by rising rank, at most one in each row; then those behind the rows. See `plan.rooms`.

    Attributes:
        is_cut: some parameter crosses rows.
        rooms_behind: those of the rooms that lie behind the rows.

    Raises:
        ValueError: any of the above does not hold; the message says where.
    """

    numels: tuple[int, ...]
    rows: tuple[Row, ...]
    rooms: tuple[Room, ...] = ()
    is_cut: bool = field(init=False)
    rooms_behind: tuple[Room, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check what the class promises."""
        num_extents = sum(len(row.extents) for row in self.rows)
        object.__setattr__(self, "is_cut", num_extents > len(self.numels))
        behind = tuple(room for room in self.rooms if room.start >= self.end_of_rows)
        object.__setattr__(self, "rooms_behind", behind)
        self._prove_rows()
        self._prove_tiling()
        self._prove_rooms()

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, including padding and rooms."""
        return self.rooms_behind[-1].stop if self.rooms_behind else self.end_of_rows

    @property
    def end_of_rows(self) -> int:
        """Where the last row ends."""
        return self.rows[-1].stop if self.rows else 0

    def offsets(self) -> list[int]:
        """Return where each parameter begins in the flat tensor."""
        first: dict[int, int] = {}  # the extents of a cut parameter follow each other
        for row in self.rows:
            for extent in row.extents:
                first.setdefault(extent.param, extent.offset)
        return [first[param] for param in range(len(self.numels))]

    def pieces(self, shapes: Sequence[Sequence[int]]) -> list[Pieces]:
        """Return who owns which rows of each parameter, by their shapes."""
        pieces: list[list[Piece]] = [[] for _ in self.numels]
        for row in self.rows:
            for param, start, stop, _ in row.extents:
                rows, numel = num_rows(shapes[param]), self.numels[param]
                is_all = stop - start == numel  # also of an empty one
                first, last = (0, rows) if is_all else (start * rows // numel, stop * rows // numel)
                pieces[param].append(Piece(row.owner, first, last))
        return list(map(tuple, pieces))

    def _prove_rows(self) -> None:
        end = 0
        for row in self.rows:
            if row.start != end or row.stop < row.start:
                raise ValueError(
                    f"row of rank {row.owner} is [{row.start}, {row.stop}), expected to start at {end}"
                )
            end = row.stop
            _prove_extents(row)
        for before, after in pairwise(self.rows):
            if after.owner <= before.owner:
                raise ValueError(
                    f"expected rows by rising rank, got rank {after.owner} behind {before.owner}"
                )

    def _prove_tiling(self) -> None:
        covered = [0] * len(self.numels)
        extents = sorted(extent for row in self.rows for extent in row.extents)
        for extent in extents:
            if extent.start != covered[extent.param]:
                raise ValueError(
                    f"parameter {extent.param} of the bucket: expected its next extent to start at "
                    f"{covered[extent.param]}, got {extent.start}"
                )
            covered[extent.param] = extent.stop
        self._prove_contiguous(extents)
        for param, (got, numel) in enumerate(zip(covered, self.numels, strict=True)):
            if got != numel:
                raise ValueError(
                    f"parameter {param} of the bucket: {got} of its {numel} elements have a place"
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

    def _prove_contiguous(self, extents: Sequence[Extent]) -> None:
        """Check the places of cut parameters.

        Args:
            extents: all, by parameter and first element.
        """
        for before, after in pairwise(extents):
            if before.param == after.param and before.end != after.offset:
                raise ValueError(
                    f"parameter {after.param} of the bucket: expected its extents to follow each other, but "
                    f"one ends at {before.end} and the next begins at {after.offset}"
                )
        for row in self.rows if len(extents) > len(self.numels) else ():
            if len(row.extents) > 1 and len({extent.param for extent in row.extents}) < len(row.extents):
                raise ValueError(f"rank {row.owner} has two extents of one parameter")


def _prove_extents(row: Row) -> None:
    end = row.start
    for extent in row.extents:
        if extent.offset < end or extent.stop < extent.start:
            raise ValueError(f"{extent} overlaps what lies before it in the row of rank {row.owner}")
        end = extent.end
    if end > row.stop:
        raise ValueError(f"the extents of rank {row.owner} end at {end}, behind its row's end {row.stop}")


def whole(numels: Sequence[int], owners: Sequence[int], alignment: int = 1) -> Layout:
    """Lay out a bucket without cutting any parameter, which is right for every optimizer.

    Within a row the parameters keep their order.

    Args:
        numels: elements of each parameter.
        owners: the group rank that owns each parameter.
        alignment: extents and rows start at multiples of this many elements.

    Raises:
        ValueError: the two sequences differ in length.
    """
    by_owner: dict[int, list[int]] = {}
    for param, (_, owner) in enumerate(zip(numels, owners, strict=True)):
        by_owner.setdefault(owner, []).append(param)
    rows: list[Row] = []
    start = 0
    for owner in sorted(by_owner):
        offset, extents = start, []
        for param in by_owner[owner]:
            extents.append(Extent(param, 0, numels[param], offset))
            offset += -(-numels[param] // alignment) * alignment
        rows.append(Row(owner, start, offset, tuple(extents)))
        start = offset
    return Layout(tuple(numels), tuple(rows))


def aligned_offsets(numels: Sequence[int], alignment: int = 1) -> list[int]:
    """Lay parameters one after the other.

    Args:
        numels: elements of each parameter.
        alignment: each starts at a multiple of this many elements.

    Returns:
        The offset of each, and that of the end, which is a multiple of the alignment too.
    """
    return list(accumulate((-(-numel // alignment) * alignment for numel in numels), initial=0))


def rows_in_order(
    numels: Sequence[int], owners: Sequence[int], ends: Sequence[int], alignment: int = 1
) -> tuple[Row, ...]:
    """Make the rows of a bucket whose parameters lie one after the other, whoever owns them.

    A row may end inside a parameter.

    Args:
        numels: elements of each parameter.
        owners: the group rank of each row, rising.
        ends: where each row ends in the flat tensor, rising. The last is the length of the flat tensor, as
            `aligned_offsets` returns it.
        alignment: parameters start at multiples of this many elements.
    """
    offsets = aligned_offsets(numels, alignment)
    rows: list[Row] = []
    param, start = 0, 0
    for number, (owner, stop) in enumerate(zip(owners, ends, strict=True)):
        extents = []
        is_last = number == len(ends) - 1
        while param < len(numels) and (offsets[param] < stop or is_last):
            first = max(start - offsets[param], 0)
            extents.append(
                Extent(param, first, min(numels[param], stop - offsets[param]), offsets[param] + first)
            )
            if extents[-1].stop < numels[param]:
                break  # the next row goes on with it
            param += 1
        rows.append(Row(owner, start, stop, tuple(extents)))
        start = stop
    return tuple(rows)


class Span(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor, all in the row of ``owner``."""

    owner: int
    start: int
    stop: int
