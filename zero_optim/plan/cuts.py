"""The rows of all buckets, and the cuts inside parameters that make them equally long. No torch.

    flat    | 0 0 0 0 0 0 0 0 0 0 0 0 0 . 1 1 |      "." is padding that aligns the next parameter
    rows    '---rank 2---'---rank 5---'-rank 7-'

Cuts lie between rows of dimension 0, at aligned addresses, where kernels run as at a tensor's begin.

Note [Even twice]
    Ranks wait for a bucket's fullest row, and for the rank that owns most of the model. Owners are chosen
    bucket by bucket if the model stays about as even as possible, else for the whole model. An uneven bucket
    whose parameters may be cut gets equal rows, assigned last to the least loaded ranks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

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
    """The numbers of one plan by parameter index; ``steps``: elements between possible cuts, 0 for none."""

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

    def cost_of(self, index: int, numel: int) -> float:
        """Return the cost of some elements of a parameter."""
        every = self.numels[index]
        return self.costs[index] if numel == every else self.costs[index] * numel / every


def choose_rows(planned: Planned, loads: Sequence[float], *, even_buckets: bool = True) -> list[Layout]:
    """Return every bucket's layout, from each rank's load: Note [Even twice]; or with only the model even."""
    cut = _cut_rows(planned, len(loads))
    owners, fullest = _choose(planned, cut, loads, by_bucket=even_buckets)
    if even_buckets and fullest > TOLERATED * (sum(loads) + sum(planned.costs)) / len(loads):
        of_model, fullest_of_model = _choose(planned, cut, loads, by_bucket=False)
        owners = of_model if fullest_of_model < fullest else owners
    layouts = []
    for number, bucket in enumerate(planned.buckets):
        numels = [planned.numels[index] for index in bucket]
        if number in cut:
            of_rows = owners.of_rows[number]
            rows = (row._replace(owner=owner) for row, owner in zip(cut[number], of_rows, strict=True))
            layouts.append(Layout(tuple(numels), tuple(rows)))
        else:
            chosen = [owners.of_params[index] for index in bucket]
            layouts.append(whole(numels, chosen, planned.alignments[number]))
    return layouts


def _cut_rows(planned: Planned, num_ranks: int) -> _CutRows:
    """Cut a bucket if whole parameters make its fullest row much longer than the mean, and cuts do not."""
    if num_ranks == 1 or not any(planned.steps):
        return {}
    min_nbytes = min_row_nbytes(sum(planned.nbytes_of(range(len(planned.numels)))))
    cut: _CutRows = {}
    for number, bucket in enumerate(planned.buckets):
        nbytes, steps = planned.nbytes_of(bucket), [planned.steps[index] for index in bucket]
        mean = sum(nbytes) / num_ranks
        tolerated = max(min_nbytes, TOLERANCE * mean)
        # Before its last parameter the fullest row was at most the mean: that decides most buckets.
        if not any(steps) or max(nbytes) <= tolerated:
            continue
        excess = fullest_row(nbytes, num_ranks) - mean
        if excess <= tolerated:
            continue
        numels, alignment = [planned.numels[index] for index in bucket], planned.alignments[number]
        ends = _even_rows(numels, steps, min(num_ranks, sum(nbytes) // min_nbytes), alignment)
        longest = max(stop - start for start, stop in pairwise([0, *ends]))
        if longest * planned.item_nbytes[bucket[0]] - mean <= (1 - GAIN) * excess:
            cut[number] = rows_in_order(numels, range(len(ends)), ends, alignment)
    return cut


class _Owners(NamedTuple):
    of_params: list[int]  # 0 in cut buckets
    of_rows: dict[int, list[int]]  # by number of the cut bucket


def _choose(
    planned: Planned, cut: _CutRows, loads: Sequence[float], *, by_bucket: bool
) -> tuple[_Owners, float]:
    """Return owners, bucket by bucket or group by group, and the largest load. Cut rows come last."""
    in_cut = {index for number in cut for index in planned.buckets[number]}
    ranks = RankLoads(loads)
    owners = _Owners([0] * len(planned.numels), {})
    for members in planned.buckets if by_bucket else planned.groups:
        whole_params = [index for index in members if index not in in_cut]
        costs = [planned.costs[index] for index in whole_params]
        chosen = ranks.assign(costs, planned.nbytes_of(whole_params) if by_bucket else None)
        for index, owner in zip(whole_params, chosen, strict=True):
            owners.of_params[index] = owner
    for number, rows in cut.items():
        bucket, least = planned.buckets[number], ranks.pop_least(len(rows))
        owners.of_rows[number] = [rank for _, rank in least]
        for (load, rank), row in zip(least, rows, strict=True):
            cost = sum(planned.cost_of(bucket[e.param], e.stop - e.start) for e in row.extents)
            ranks.push(load + cost, rank)
    return owners, ranks.fullest()


def min_row_nbytes(nbytes: int) -> int:
    """Return the minimum bytes of a cut row in a plan."""
    return max(MIN_ROW_NBYTES, nbytes // MAX_ROWS)


def _even_rows(numels: Sequence[int], steps: Sequence[int], count: int, alignment: int) -> list[int]:
    """Return the ends of a bucket's rows, at most ``count``, over the mean by at most a step and padding."""
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
