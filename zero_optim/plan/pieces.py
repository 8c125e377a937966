"""The rows of a parameter that each rank owns. Pure arithmetic, no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Piece(NamedTuple):
    """Rows ``[start, stop)`` of dimension 0 that ``owner`` owns; pieces adjoin by rising owner."""

    owner: int
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def num_rows(shape: Sequence[int]) -> int:
    """Return the rows of a shape."""
    return shape[0] if len(shape) else 1


def is_whole(piece: Piece, shape: Sequence[int]) -> bool:
    """Whether a piece has all rows of a shape."""
    return piece.stop - piece.start == num_rows(shape)


def rows_of(tensor: "Tensor", piece: Piece) -> "Tensor":
    """View a piece's rows of a dense tensor with the parameter's shape; the tensor itself if that is all."""
    return tensor if is_whole(piece, tensor.shape) else tensor[piece.start : piece.stop]


def whole_piece(owner: int, shape: Sequence[int]) -> Pieces:
    """Return a piece with all rows."""
    return (Piece(owner, 0, num_rows(shape)),)


def piece_of(pieces: Pieces, rank: int) -> Piece | None:
    """Return a rank's piece, or None."""
    return next((piece for piece in pieces if piece.owner == rank), None)


def owned_by_text(pieces: Pieces) -> str:
    """Describe a parameter's owners, for messages and for ranks to compare."""
    if len(pieces) == 1:
        return f"owned by rank {pieces[0].owner}"
    rows = [f"rank {owner} (rows {start} to {stop - 1})" for owner, start, stop in pieces]
    return f"owned by {', '.join(rows)}"
