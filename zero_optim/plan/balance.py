"""Owners bucket by bucket: even in every bucket, and even over the model. Pure arithmetic, no torch.

What a rank owns in a bucket is what it sends when the bucket is gathered. So the others wait for the rank
that owns most of a bucket, even if every rank owns the same over the whole model. As in `partition`, every
rank computes this from the same numbers and gets the same owners.
"""

import heapq
from collections.abc import Iterable, Sequence


class RankLoads:
    """What each rank owns so far, with the least loaded ranks at hand.

    A bucket costs time for its parameters, whatever the number of ranks.

    Args:
        loads: the cost of what each rank owns, by rank.
    """

    def __init__(self, loads: Sequence[float]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def fullest(self) -> float:
        """Return the largest load."""
        return max(self._heap)[0]

    def take(self, count: int) -> list[tuple[float, int]]:
        """Take out the least loaded ranks, as (load, rank) by rising rank; `give_back` has to follow."""
        return sorted((heapq.heappop(self._heap) for _ in range(count)), key=lambda taken: taken[1])

    def give_back(self, ranks: Iterable[tuple[float, int]]) -> None:
        """Put ranks back with their new loads, as (load, rank)."""
        for load, rank in ranks:
            heapq.heappush(self._heap, (load, rank))

    def assign_bucket(self, sizes: Sequence[int], costs: Sequence[float]) -> list[int]:
        """Choose an owner for every parameter of a bucket, and add to the loads.

        The largest parameter goes first, to the rank that owns the fewest bytes of the bucket; of those, to
        the one with the least load. Ties go to the lower index and the lower rank.

        Args:
            sizes: what owning each parameter adds to its owner's row, in bytes.
            costs: what it adds to its owner's load.
        """
        owners = [0] * len(sizes)
        touched: list[tuple[int, float, int]] = []  # a heap of (bytes of the bucket, load, rank)
        for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            size, cost = sizes[index], costs[index]
            if self._heap and (not touched or (0, *self._heap[0]) < touched[0]):
                load, owner = heapq.heappop(self._heap)
                heapq.heappush(touched, (size, load + cost, owner))
            else:
                held, load, owner = touched[0]
                heapq.heapreplace(touched, (held + size, load + cost, owner))
            owners[index] = owner
        self.give_back((load, rank) for _, load, rank in touched)
        return owners


def fullest_row(sizes: Sequence[int], num_ranks: int) -> int:
    """Return the bytes of the fullest row that `RankLoads.assign_bucket` makes; loads do not matter to it."""
    if len(sizes) <= num_ranks:
        return max(sizes, default=0)
    rows = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(rows, rows[0] + size)
    return max(rows)
