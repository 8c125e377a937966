"""`Slices`: where the rows of a bucket lie in W equal slices; `Stripes`: on hosts. No communication.

Rows adjoin in the order of ranks, of any lengths; padding lies behind the last one. So cost does not depend
on who owns what: rank r reduces slice r or sends it, and where rows are not the slices one more all-to-all
brings rows to slices, or slices to rows. With few owners rows never are: so many ranks have more collectives
than few. Had each rank an equal slice, messages of 1,024 ranks would be tiny, and no matrix whole.

Note [Slices on hosts]
    Ranks of a host have equal slices of their own rows, or the rows where these are nearly even; the slices
    of the ranks number j of all hosts are stripe j. So an element crosses between hosts once. Where a rank
    would receive more than a bucket, slices are those of the bucket, and rows cross again: 1 / 2H more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

_NEARLY_EVEN = 1.02  # with padding up to the longest row, of the rows alone
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

    @property
    def num_collectives(self) -> int:
        """Collectives of a gather; on hosts of a sum too."""
        return 2 - self.is_even

    @cached_property
    def splits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What this rank's slice shares with each row, and this rank's row with each slice."""
        rows, slices = (list(pairwise(accumulate(of, initial=0))) for of in (self.rows, self.parts))
        in_slice = tuple(_shared(slices[self.rank], row) for row in rows)
        return in_slice, tuple(_shared(rows[self.rank], part) for part in slices)

    @cached_property
    def first(self) -> int:
        """Where this rank's row begins in the bucket."""
        return sum(self.rows[: self.rank])

    def row(self, flat: Tensor) -> Tensor:
        """Return this rank's row of a bucket."""
        return flat.narrow(0, self.first, self.rows[self.rank])


@dataclass(frozen=True)
class Stripes(Slices):
    """Slices on hosts, of ``here`` ranks each: Note [Slices on hosts]."""

    here: int

    def _by_host(self, of_ranks: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(of_ranks[at : at + self.here]) for at in range(0, len(of_ranks), self.here)]

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The length of each rank's slice, with padding behind the bucket alone."""
        hosts = self._by_host(self.rows)
        if len(self.rows) * max(self.rows) <= _NEARLY_EVEN * self.total:
            return self.rows
        if (len(hosts) - 1) * max(map(sum, hosts)) > self.here * self.total:
            return (self.slice,) * len(self.rows)
        return tuple(chain.from_iterable(Slices(0, host).parts for host in hosts))

    @cached_property
    def is_direct(self) -> bool:
        """Whether slices are the rows."""
        return self.parts == self.rows

    @property
    def num_collectives(self) -> int:
        """One inside hosts, one across, and one where slices are not the rows."""
        return 3 - self.is_direct

    @cached_property
    def sent(self) -> tuple[list[int], list[int]]:
        """What this rank sends of a bucket to each rank of its host, and of its stripe to each host."""
        stripes = [self.parts[number :: self.here] for number in range(self.here)]
        return [*map(sum, stripes)], [*stripes[self.rank % self.here]]

    @cached_property
    def lengths(self) -> list[int]:
        """The length of a slice on each host, as it is gathered: with padding."""
        hosts = self._by_host(self.parts)
        return [max(self.parts)] * len(hosts) if self.is_direct else [*map(max, hosts)]

    @cached_property
    def _grid(self) -> tuple[int, int, int] | None:
        """Hosts, their ranks and the length of slices, if these are even."""
        is_even = min(self.parts) == max(self.parts)
        return (len(self.parts) // self.here, self.here, self.parts[0]) if is_even else None

    @cached_property
    def _places(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Where uneven slices begin, and their lengths: in the bucket and in gathered stripes."""
        here, stripe = self.here, sum(self.lengths)
        starts, offsets = ([*accumulate(of, initial=0)] for of in (self.parts, self.lengths))
        filled = [(rank, length) for rank, length in enumerate(self.parts) if length]
        by_stripe = sorted(filled, key=lambda each: each[0] % here)
        return [(starts[rank], length) for rank, length in by_stripe], [
            (rank % here * stripe + offsets[rank // here], length) for rank, length in filled
        ]

    def packed(self, flat: Tensor) -> Tensor:
        """Copy a bucket's slices, stripe by stripe."""
        if self._grid is None:
            return torch.cat([flat.narrow(0, *place) for place in self._places[0]])
        numel = sum(self.parts)
        if flat.numel() < numel:
            flat = torch.nn.functional.pad(flat, (0, numel - flat.numel()))
        return flat[:numel].view(self._grid).transpose(0, 1).reshape(-1)

    def unpack(self, stripes: Tensor, flat: Tensor) -> None:
        """Copy gathered stripes into a bucket."""
        if self._grid is None:
            torch.cat([stripes.narrow(0, *place) for place in self._places[1]], out=flat[: self.total])
        else:
            by_host = flat[: stripes.numel()].view(self._grid)
            by_host.transpose(0, 1).copy_(stripes.view_as(by_host.transpose(0, 1)))


@lru_cache(2**12)
def stripes_of(rows: Slices, here: int) -> Stripes:
    """Return the slices on hosts of so many ranks, which adjoin."""
    return Stripes(rows.rank, rows.rows, here)


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
