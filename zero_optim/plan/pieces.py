"""Which rows of a parameter each rank owns. Pure arithmetic, no torch; the plan is made of it."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows ``[start, stop)`` of a parameter's dimension 0, which ``owner`` owns.

    A parameter without dimensions counts as one row. The pieces of a parameter follow each other, and their
    owners rise. So a rank owns at most one piece of a parameter.
    """

    owner: int
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def num_rows(shape: Sequence[int]) -> int:
    """Return how many rows a parameter of some shape has."""
    return shape[0] if len(shape) else 1


def is_whole(piece: Piece, shape: Sequence[int]) -> bool:
    """Whether a piece has all rows of a parameter of some shape."""
    return piece.stop - piece.start == num_rows(shape)


def numel_of(piece: Piece, shape: Sequence[int]) -> int:
    """Return how many elements a piece of a parameter of some shape has."""
    return (piece.stop - piece.start) * math.prod(shape[1:])


def whole_piece(owner: int, shape: Sequence[int]) -> Pieces:
    """Give all rows of a parameter to one rank."""
    return (Piece(owner, 0, num_rows(shape)),)


def piece_of(pieces: Pieces, rank: int) -> Piece | None:
    """Find the piece that a rank owns, None if it owns no row."""
    return next((piece for piece in pieces if piece.owner == rank), None)


def owned_by_text(pieces: Pieces) -> str:
    """Say who owns a parameter, as ranks compare it and messages show it."""
    if len(pieces) == 1:
        return f"owned by rank {pieces[0].owner}"
    rows = [f"rank {owner} (rows {start} to {stop - 1})" for owner, start, stop in pieces]
    return f"owned by {', '.join(rows)}"
