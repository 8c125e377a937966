"""Rooms in the layout of a bucket: places for what travels with each row. Pure arithmetic, no torch."""

from collections.abc import Sequence

from zero_optim.plan.layout import Layout, Room, Row


def with_rooms(layout: Layout, length: int, alignment: int = 1) -> Layout:
    """Make room in the rows of a layout; see `Room`.

    Padding is used where there is enough of it. Otherwise the row grows by whole units of the alignment, so
    that extents start at multiples of it as before. The extents of a parameter follow each other without a
    gap, so a row that lies within one parameter gets no room; nor does an empty one.

    Args:
        layout: without rooms.
        length: of each room, in elements, above 0.
        alignment: extents and rows start at multiples of this many elements.
    """
    rows: list[Row] = []
    rooms: list[Room] = []
    shift = 0
    for row in layout.rows:
        place = _place_for_room(row, layout.numels, length)
        start, extents = row.start + shift, []
        for number, extent in enumerate(row.extents):
            is_here = place is not None and place[0] == number
            if is_here and place == (number, "before"):
                begin = extent.offset + shift
                rooms.append(Room(row.owner, extent.param, begin, begin + length))
                shift += -(-length // alignment) * alignment
            moved = extent._replace(offset=extent.offset + shift)
            extents.append(moved)
            if is_here and place == (number, "behind"):
                rooms.append(Room(row.owner, extent.param, moved.end, moved.end + length))
                shift += -(-max(0, length - _gap_behind(row, number)) // alignment) * alignment
        rows.append(Row(row.owner, start, row.stop + shift, tuple(extents)))
    return Layout(layout.numels, tuple(rows), tuple(rooms))


def with_rooms_behind(layout: Layout, owners: Sequence[int], length: int, alignment: int = 1) -> Layout:
    """Make rooms behind the rows of a layout, for ranks that have none; see `Room`.

    They are sent with parameter 0.

    Args:
        layout: without such rooms.
        owners: the ranks, rising.
        length: of each room, in elements, above 0.
        alignment: rooms start at multiples of this many elements.
    """
    size = -(-length // alignment) * alignment
    starts = (layout.end_of_rows + size * number for number in range(len(owners)))
    behind = [Room(owner, 0, start, start + length) for owner, start in zip(owners, starts, strict=True)]
    return Layout(layout.numels, layout.rows, (*layout.rooms, *behind))


def _place_for_room(row: Row, numels: Sequence[int], length: int) -> tuple[int, str] | None:
    """Choose beside which extent of a row its room is: behind the end of a parameter, or before its start."""
    filled = [(number, extent) for number, extent in enumerate(row.extents) if extent.stop > extent.start]
    behind = [number for number, extent in filled if extent.stop == numels[extent.param]]
    if behind:
        padded = [number for number in behind if _gap_behind(row, number) >= length]
        return (padded or behind)[-1], "behind"
    return next(((number, "before") for number, extent in filled if extent.start == 0), None)


def _gap_behind(row: Row, number: int) -> int:
    """Tell how many elements of padding follow an extent of a row."""
    behind = row.extents[number + 1].offset if number + 1 < len(row.extents) else row.stop
    return behind - row.extents[number].end
