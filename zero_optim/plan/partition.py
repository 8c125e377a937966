"""Greedy balanced assignment: costs in, owners out. Pure arithmetic, no torch.

Every rank computes this from the same costs and must get the same owners without communication. So nothing
here depends on hashing, on floating-point order or on the rank.
"""

import heapq
from collections.abc import Iterable, Sequence


def assign_owners(
    groups: Iterable[Sequence[float]], num_ranks: int, loads: Sequence[float] | None = None
) -> list[list[int]]:
    """Choose an owner for every item, so that the ranks' total costs are nearly equal.

    Groups are assigned one after the other. Each starts from the loads that the groups before it left, so
    a group added later changes no owner chosen before. Within a group the costliest item goes first, to
    the least loaded rank. This is the longest-processing-time rule of Graham, "Bounds on multiprocessing
    timing anomalies", 1969: for one group the fullest rank holds at most 4/3 of the best possible. Ties
    between costs go to the lower index, ties between loads to the lower rank.

    Args:
        groups: one sequence of costs for each group; a cost is a finite number >= 0 in any unit.
        num_ranks: number of ranks that can own items, >= 1.
        loads: what each rank owns already, in the unit of the costs; all zero if None.

    Returns:
        For each group the owner of each item, in the order given.

    Raises:
        ValueError: ``num_ranks`` below 1, ``loads`` of another length, or a cost that is negative
            or not finite.
    """
    if num_ranks < 1:
        raise ValueError(f"expected at least one rank to assign owners to, got num_ranks={num_ranks}")
    loads = [0] * num_ranks if loads is None else loads
    if len(loads) != num_ranks:
        raise ValueError(f"expected one load for each of {num_ranks} ranks, got {len(loads)}")
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    return [_assign_group(costs, heap) for costs in groups]


def _assign_group(costs: Sequence[float], heap: list[tuple[float, int]]) -> list[int]:
    """Assign one group, and update ``heap``, of (load, rank), in place."""
    for index, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"expected finite costs of at least 0, got {cost} for item {index}")
    owners = [0] * len(costs)
    # sorted() is stable, also in reverse, so equal costs keep the order of their indices.
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, owner = heap[0]
        owners[index] = owner
        heapq.heapreplace(heap, (load + costs[index], owner))
    return owners


def rank_loads(costs: Iterable[float], owners: Iterable[int], num_ranks: int) -> list[float]:
    """Add up the costs that each rank owns.

    Raises:
        ValueError: ``costs`` and ``owners`` differ in length.
    """
    loads: list[float] = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads
