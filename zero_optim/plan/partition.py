"""Greedy balanced assignment of owners, over the model and bucket by bucket. Pure arithmetic, no torch.

Each rank computes it, so nothing depends on hashing, floating-point order or the rank.
"""

import heapq
from collections.abc import Iterable, Sequence


def assign_owners(
    groups: Iterable[Sequence[float]], num_ranks: int, loads: Sequence[float] | None = None
) -> list[list[int]]:
    """Return an owner for every item, so that the ranks' total costs are nearly equal.

    A later group changes no earlier owner. In a group the costliest item goes first, to the least loaded rank
    (longest-processing-time rule, Graham, "Bounds on multiprocessing timing anomalies", 1969). For one group
    the fullest rank holds at most 4/3 of the best possible. Ties go to the lower index or rank. Costs are
    finite and >= 0; ``loads`` are what ranks own already. ValueError for other costs.
    """
    if num_ranks < 1:
        raise ValueError(f"expected at least one rank to assign owners to, got num_ranks={num_ranks}")
    loads = [0] * num_ranks if loads is None else loads
    if len(loads) != num_ranks:
        raise ValueError(f"expected one load for each of {num_ranks} ranks, got {len(loads)}")
    ranks = RankLoads(loads)
    return [ranks.assign_group(costs) for costs in groups]


class RankLoads:
    """Each rank's load so far, in a heap: time depends on parameters, not on ranks."""

    def __init__(self, loads: Sequence[float]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def fullest(self) -> float:
        """Return the largest load."""
        return max(self._heap)[0]

    def take(self, count: int) -> list[tuple[float, int]]:
        """Remove the least loaded ranks; return (load, rank) pairs by rank; `give_back` must follow."""
        return sorted((heapq.heappop(self._heap) for _ in range(count)), key=lambda taken: taken[1])

    def give_back(self, ranks: Iterable[tuple[float, int]]) -> None:
        """Insert (load, rank) pairs again."""
        for load, rank in ranks:
            heapq.heappush(self._heap, (load, rank))

    def assign_group(self, costs: Sequence[float]) -> list[int]:
        """Return an owner for each item, as `assign_owners`, and add the costs to the loads."""
        for index, cost in enumerate(costs):
            if not 0 <= cost < float("inf"):
                raise ValueError(f"expected finite costs of at least 0, got {cost} for item {index}")
        owners = [0] * len(costs)
        # sorted() is stable, even reversed: equal costs keep their order.
        for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            load, owner = self._heap[0]
            owners[index] = owner
            heapq.heapreplace(self._heap, (load + costs[index], owner))
        return owners

    def assign_bucket(self, sizes: Sequence[int], costs: Sequence[float]) -> list[int]:
        """Return an owner for each parameter of a bucket, and add the costs to the loads.

        The largest goes first, to the rank with the fewest bytes of the bucket, then the least load. Ties go
        to the lower index and rank.
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
    """Return the bytes of `RankLoads.assign_bucket`'s fullest row, whatever the loads."""
    if len(sizes) <= num_ranks:
        return max(sizes, default=0)
    rows = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(rows, rows[0] + size)
    return max(rows)
