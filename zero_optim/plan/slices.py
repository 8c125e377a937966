"""`Slices`: where the rows of a bucket lie in W equal slices. No communication.

Rows adjoin in the order of ranks, of any lengths; padding lies behind the last one. So cost does not depend
on who owns what: rank r reduces slice r or sends it, and where rows are not the slices one more all-to-all
brings rows to slices, or slices to rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 16  # elements; the length of a slice is a multiple of it, unless all rows are as long


@dataclass(frozen=True)
class Slices:
    """The slices and rows of a bucket, in elements; the row of rank r has ``rows[r]``. Computed once."""

    rank: int
    rows: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        """The elements of all rows, without padding."""
        return sum(self.rows)

    @cached_property
    def is_even(self) -> bool:
        """Whether the rows are the slices."""
        return min(self.rows) == max(self.rows)

    @cached_property
    def slice(self) -> int:
        """The length of each slice; a bucket has W of them, with padding."""
        return self.rows[0] if self.is_even else -(-self.total // (len(self.rows) * UNIT)) * UNIT

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The length of each slice without the padding."""
        return tuple(
            max(0, min(self.slice, self.total - rank * self.slice)) for rank in range(len(self.rows))
        )

    @cached_property
    def is_direct(self) -> bool:
        """Whether each owner may receive its row from all other ranks: no more than a bucket."""
        return (len(self.rows) - 1) * max(self.rows) <= self.total

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """What this rank's slice shares with each row, and this rank's row with each slice."""
        rows = list(_spans(self.rows))
        slices = list(_spans([self.slice] * len(self.rows)))
        in_slice = [_shared(slices[self.rank], row) for row in rows]
        return in_slice, [_shared(rows[self.rank], part) for part in slices]

    @cached_property
    def first(self) -> int:
        """Where this rank's row begins in the bucket."""
        return sum(self.rows[: self.rank])

    def row(self, flat: "Tensor") -> "Tensor":
        """Return this rank's row of a bucket."""
        return flat.narrow(0, self.first, self.rows[self.rank])


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True))


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
