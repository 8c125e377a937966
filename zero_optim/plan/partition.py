"""Greedy balanced assignment of owners, and of parameters to buckets, equal on every rank. No torch."""

import heapq
from collections.abc import Hashable, Sequence


class RankLoads:
    """Each rank's load so far, in a heap: time depends on parameters, not on ranks.

    Of one list the costliest goes first, to the least load (Graham, 1969): at most 4/3 of the best possible.
    """

    def __init__(self, loads: Sequence[float]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def fullest(self) -> float:
        """Return the largest load."""
        return max(self._heap)[0]

    def by_load(self) -> list[int]:
        """List the ranks by rising load."""
        return [rank for _, rank in sorted(self._heap)]

    def assign(
        self, costs: Sequence[float], nbytes: Sequence[int] | None = None, most: int | None = None
    ) -> list[int]:
        """Return an owner for each item, ``most`` in all, and add the costs; costliest or largest first."""
        for index, cost in enumerate(costs):
            if not 0 <= cost < float("inf"):
                raise ValueError(f"expected finite costs of at least 0, got {cost} for item {index}")
        owners = [0] * len(costs)
        sizes = [0] * len(costs) if nbytes is None else nbytes
        chosen: list[tuple[int, float, int]] = []  # a heap of (bytes of the bucket, load, rank)
        # sorted() is stable, even reversed: equal items keep their order.
        for index in sorted(range(len(costs)), key=(nbytes or costs).__getitem__, reverse=True):
            may_add = self._heap and (most is None or len(chosen) < most)
            if may_add and (not chosen or (0, *self._heap[0]) < chosen[0]):
                load, owner = heapq.heappop(self._heap)
                heapq.heappush(chosen, (sizes[index], load + costs[index], owner))
            else:
                size, load, owner = chosen[0]
                heapq.heapreplace(chosen, (size + sizes[index], load + costs[index], owner))
            owners[index] = owner
        for _, load, owner in chosen:
            heapq.heappush(self._heap, (load, owner))
        return owners


def assign_buckets(
    keys: Sequence[Hashable], nbytes: Sequence[int], cap_nbytes: int | Sequence[int], order: Sequence[int]
) -> list[list[int]]:
    """Fill buckets in an order with parameters of equal key, up to the one that reaches the cap; as indices.

    A list of caps is for the first, second, … bucket of a key.
    """
    caps = [cap_nbytes] if isinstance(cap_nbytes, int) else list(cap_nbytes)
    if not caps or min(caps) < 1:
        raise ValueError(f"expected a bucket capacity of at least 1 byte, got {cap_nbytes}")
    full: list[list[int]] = []
    num_full: dict[Hashable, int] = {}
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in order:
        key = keys[index]
        bucket, size = open_buckets.get(key, ([], 0))
        cap = caps[min(num_full.get(key, 0), len(caps) - 1)]
        if bucket and size >= cap:
            full.append(bucket)
            num_full[key] = num_full.get(key, 0) + 1
            bucket, size = [], 0
        bucket.append(index)
        open_buckets[key] = (bucket, size + nbytes[index])
    return full + [bucket for bucket, _ in open_buckets.values()]
