"""The rows and cuts of all buckets. Pure arithmetic, no torch.

Note [Even twice]
    Ranks wait for a bucket's fullest row, and for the rank that owns most of the model. Owners chosen bucket
    by bucket are taken if the model stays about as even as possible, else owners chosen for the whole model.
    An uneven bucket whose parameters may be cut gets equal rows, assigned last to the least loaded ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from zero_optim.plan.cuts import even_rows, is_uneven, is_worth_it, longest_row, min_row_nbytes
from zero_optim.plan.layout import Layout, Row, rows_in_order, whole
from zero_optim.plan.partition import RankLoads, assign_owners, rank_loads

_CutRows: TypeAlias = dict[int, tuple[Row, ...]]  # rows of cut buckets, by bucket number
# For even buckets the fullest rank's load may exceed the mean by this factor.
TOLERATED = 1.05


@dataclass(frozen=True, slots=True)
class Planned:
    """The numbers of one plan by parameter index, ``alignments`` (elements) by bucket.

    ``steps`` are elements between possible cuts, 0 for none. ``groups`` and ``buckets`` list indices.
    """

    numels: Sequence[int]
    item_nbytes: Sequence[int]
    costs: Sequence[float]
    steps: Sequence[int]
    groups: Sequence[range]
    buckets: Sequence[Sequence[int]]
    alignments: Sequence[int]

    def nbytes_of(self, bucket: Sequence[int]) -> list[int]:
        """Return the bytes of each parameter of a bucket."""
        return [self.numels[index] * self.item_nbytes[index] for index in bucket]

    def numels_of(self, bucket: Sequence[int]) -> list[int]:
        """Return the elements of each parameter of a bucket."""
        return [self.numels[index] for index in bucket]

    def cost_of(self, index: int, numel: int) -> float:
        """Return the cost of some elements of a parameter."""
        every = self.numels[index]
        return self.costs[index] if numel == every else self.costs[index] * numel / every


@dataclass(frozen=True, slots=True)
class _Choice:
    """Owners of parameters (0 in cut buckets) and of cut rows, and the largest load."""

    owners: list[int]
    row_owners: dict[int, list[int]]
    fullest: float


def choose_rows(planned: Planned, loads: Sequence[float]) -> list[Layout]:
    """Return every bucket's layout, given each rank's load: Note [Even twice]."""
    cut = _cut_rows(planned, len(loads))
    chosen = _bucket_by_bucket(planned, cut, loads)
    mean = (sum(loads) + sum(planned.costs)) / len(loads)
    if chosen.fullest > TOLERATED * mean:
        other = _group_by_group(planned, cut, loads)
        chosen = other if other.fullest < chosen.fullest else chosen
    return [
        _with_owners(planned.numels_of(bucket), cut[number], chosen.row_owners[number])
        if number in cut
        else whole(
            planned.numels_of(bucket), [chosen.owners[index] for index in bucket], planned.alignments[number]
        )
        for number, bucket in enumerate(planned.buckets)
    ]


def _with_owners(numels: Sequence[int], rows: Sequence[Row], owners: Sequence[int]) -> Layout:
    owned = (Row(owner, row.start, row.stop, row.extents) for row, owner in zip(rows, owners, strict=True))
    return Layout(tuple(numels), tuple(owned))


def _cut_rows(planned: Planned, num_ranks: int) -> _CutRows:
    """Cut the buckets that gain; rows have owner numbers 0, 1, 2, …."""
    if num_ranks == 1 or not any(planned.steps):
        return {}
    min_nbytes = min_row_nbytes(sum(planned.nbytes_of(range(len(planned.numels)))))
    found: _CutRows = {}
    for number, bucket in enumerate(planned.buckets):
        nbytes, steps = planned.nbytes_of(bucket), [planned.steps[index] for index in bucket]
        if not any(steps) or not is_uneven(nbytes, num_ranks, min_nbytes):
            continue
        numels, alignment = planned.numels_of(bucket), planned.alignments[number]
        ends = even_rows(numels, steps, min(num_ranks, sum(nbytes) // min_nbytes), alignment)
        if is_worth_it(nbytes, num_ranks, longest_row(ends) * planned.item_nbytes[bucket[0]]):
            found[number] = rows_in_order(numels, range(len(ends)), ends, alignment)
    return found


def _bucket_by_bucket(planned: Planned, cut: _CutRows, loads: Sequence[float]) -> _Choice:
    ranks = RankLoads(loads)
    owners = [0] * len(planned.numels)
    for number, bucket in enumerate(planned.buckets):
        if number not in cut:
            costs = [planned.costs[index] for index in bucket]
            chosen = ranks.assign_bucket(planned.nbytes_of(bucket), costs)
            for index, owner in zip(bucket, chosen, strict=True):
                owners[index] = owner
    return _Choice(owners, _row_owners(planned, cut, ranks), ranks.fullest())


def _group_by_group(planned: Planned, cut: _CutRows, loads: Sequence[float]) -> _Choice:
    in_cut = {index for number in cut for index in planned.buckets[number]}
    members = [[index for index in group if index not in in_cut] for group in planned.groups]
    by_group = assign_owners([[planned.costs[i] for i in group] for group in members], len(loads), loads)
    indices, chosen = list(chain.from_iterable(members)), list(chain.from_iterable(by_group))
    owners = [0] * len(planned.numels)
    for index, owner in zip(indices, chosen, strict=True):
        owners[index] = owner
    added = rank_loads((planned.costs[index] for index in indices), chosen, len(loads))
    ranks = RankLoads([load + more for load, more in zip(loads, added, strict=True)])
    return _Choice(owners, _row_owners(planned, cut, ranks), ranks.fullest())


def _row_owners(planned: Planned, cut: _CutRows, ranks: RankLoads) -> dict[int, list[int]]:
    """Assign cut rows to the least loaded ranks, and update the loads."""
    owners: dict[int, list[int]] = {}
    for number, rows in cut.items():
        bucket, taken = planned.buckets[number], ranks.take(len(rows))
        owners[number] = [rank for _, rank in taken]
        costs = [
            sum(planned.cost_of(bucket[extent.param], extent.stop - extent.start) for extent in row.extents)
            for row in rows
        ]
        ranks.give_back((load + cost, rank) for (load, rank), cost in zip(taken, costs, strict=True))
    return owners
