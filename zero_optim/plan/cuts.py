"""The rows of all buckets, and the cuts inside parameters that make them equally long. No torch.

    flat    | 0 0 0 0 0 0 0 0 0 0 0 0 0 . 1 1 |      "." is padding that aligns the next parameter
    rows    '---rank 2---'---rank 5---'-rank 7-'

Cuts lie between rows of dimension 0, at aligned addresses, where kernels run as at a tensor's begin.

Note [Even twice]
    Ranks wait for a bucket's fullest row, and for the rank that owns most of the model. Owners chosen bucket
    by bucket are taken if the model stays about as even as possible, else owners chosen for the whole model.
    An uneven bucket whose parameters may be cut gets equal rows, assigned last to the least loaded ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from zero_optim.plan.layout import Layout, Row, aligned_offsets, rows_in_order, whole
from zero_optim.plan.partition import RankLoads, fullest_row

_CutRows: TypeAlias = dict[int, tuple[Row, ...]]  # rows of cut buckets, by bucket number

# For even buckets the fullest rank's load may be the mean times this.
TOLERATED = 1.05
# Latency dominates shorter messages.
MIN_ROW_NBYTES = 64 * 2**10
# The most rows of a plan, beside one for each bucket. For 16,384 ranks a row is then at least a sixteenth of
# a rank's part.
MAX_ROWS = 2**18
# The tolerated excess of a bucket's longest row over the mean, relative to the mean.
TOLERANCE = 0.05
# Cuts must remove at least this part of the excess.
GAIN = 0.25


@dataclass(frozen=True, slots=True)
class Planned:
    """The numbers of one plan by parameter index, ``alignments`` (elements) by bucket.

    ``steps``: elements between possible cuts, 0 for none. ``groups`` and ``buckets`` list indices.
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


def choose_rows(planned: Planned, loads: Sequence[float], *, even_buckets: bool = True) -> list[Layout]:
    """Return every bucket's layout, from each rank's load: Note [Even twice].

    Without ``even_buckets`` only the model is even.
    """
    cut = _cut_rows(planned, len(loads))
    if even_buckets:
        choice = _bucket_by_bucket(planned, cut, loads)
        mean = (sum(loads) + sum(planned.costs)) / len(loads)
    if not even_buckets or choice.fullest > TOLERATED * mean:
        other = _group_by_group(planned, cut, loads)
        choice = other if not even_buckets or other.fullest < choice.fullest else choice
    layouts = []
    for number, bucket in enumerate(planned.buckets):
        numels = planned.numels_of(bucket)
        if number in cut:
            owned = zip(cut[number], choice.row_owners[number], strict=True)
            layouts.append(Layout(tuple(numels), tuple(row._replace(owner=owner) for row, owner in owned)))
        else:
            owners = [choice.owners[index] for index in bucket]
            layouts.append(whole(numels, owners, planned.alignments[number]))
    return layouts


def _cut_rows(planned: Planned, num_ranks: int) -> _CutRows:
    if num_ranks == 1 or not any(planned.steps):
        return {}
    min_nbytes = min_row_nbytes(sum(planned.nbytes_of(range(len(planned.numels)))))
    cut: _CutRows = {}
    for number, bucket in enumerate(planned.buckets):
        nbytes, steps = planned.nbytes_of(bucket), [planned.steps[index] for index in bucket]
        if not any(steps) or not is_uneven(nbytes, num_ranks, min_nbytes):
            continue
        numels, alignment = planned.numels_of(bucket), planned.alignments[number]
        ends = even_rows(numels, steps, min(num_ranks, sum(nbytes) // min_nbytes), alignment)
        if is_worth_it(nbytes, num_ranks, longest_row(ends) * planned.item_nbytes[bucket[0]]):
            cut[number] = rows_in_order(numels, range(len(ends)), ends, alignment)
    return cut


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
    ranks = RankLoads(loads)
    owners = [0] * len(planned.numels)
    for group in planned.groups:
        members = [index for index in group if index not in in_cut]
        chosen = ranks.assign_group([planned.costs[index] for index in members])
        for index, owner in zip(members, chosen, strict=True):
            owners[index] = owner
    return _Choice(owners, _row_owners(planned, cut, ranks), ranks.fullest())


def _row_owners(planned: Planned, cut: _CutRows, ranks: RankLoads) -> dict[int, list[int]]:
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


def min_row_nbytes(nbytes: int) -> int:
    """Return the minimum bytes of a cut row in a plan."""
    return max(MIN_ROW_NBYTES, nbytes // MAX_ROWS)


def cut_step(numel: int, num_rows: int, alignment: int) -> int:
    """Return the elements between possible cuts: whole rows, aligned."""
    return math.lcm(numel // num_rows, alignment)


def is_uneven(nbytes: Sequence[int], num_ranks: int, min_nbytes: int) -> bool:
    """Whether whole parameters make a bucket's fullest row much longer than the mean."""
    mean = sum(nbytes) / num_ranks
    tolerated = max(min_nbytes, TOLERANCE * mean)
    # Before its last parameter the fullest row was at most the mean: this settles most buckets.
    return max(nbytes, default=0) > tolerated and fullest_row(nbytes, num_ranks) > mean + tolerated


def even_rows(numels: Sequence[int], steps: Sequence[int], count: int, alignment: int) -> list[int]:
    """Return the ascending end offsets of a bucket's rows, in elements.

    A row exceeds the mean by at most one step and one padding. ``steps`` are elements between possible cuts,
    0 for none. Steps longer than a row make fewer rows than ``count``.
    """
    *offsets, total = aligned_offsets(numels, alignment)
    ends = [total]
    for number in range(count - 1, 0, -1):
        target = total * number // count
        index = bisect_right(offsets, target) - 1
        end = _nearest(target, offsets[index], [*offsets, total][index + 1], numels[index], steps[index])
        if 0 < end < ends[-1]:
            ends.append(end)
    return ends[::-1]


def _nearest(target: int, start: int, after: int, numel: int, step: int) -> int:
    below = start if step == 0 else start + (target - start) // step * step
    above = after if step == 0 else below + step
    if above >= start + numel:
        above = after
    if below >= start + numel:
        below = after
    return below if target - below <= above - target else above


def is_worth_it(nbytes: Sequence[int], num_ranks: int, longest: int) -> bool:
    """Whether cut rows are clearly more even than whole parameters."""
    mean = sum(nbytes) / num_ranks
    return longest - mean <= (1 - GAIN) * (fullest_row(nbytes, num_ranks) - mean)


def longest_row(ends: Sequence[int]) -> int:
    """Return the elements of the longest row."""
    return max((stop - start for start, stop in pairwise([0, *ends])), default=0)
