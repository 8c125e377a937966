"""The rows of all buckets, and the cuts inside parameters that make them equally long. No torch.

    flat    | 0 0 0 0 0 0 0 0 0 0 0 0 0 . 1 1 |      "." is padding that aligns the next parameter
    rows    '---rank 2---'---rank 5---'-rank 7-'

Cuts lie between rows of dimension 0, at aligned addresses, where kernels run as at a tensor's begin.

Note [Few owners]
    Ranks wait for a bucket's fullest row, and for the rank that owns most of the model. A short message takes
    as long as a longer one, so a bucket has only as many owners as rows of `row_nbytes` need. Whole
    parameters get owners bucket by bucket if the model stays about as even as possible, else for the whole
    model. A bucket that would be uneven is cut if its largest parameter may be. Ranks take equal turns along
    the cut buckets, so the next bucket's owners follow, and the model is even:

        buckets   |    0    |   1   |     2     |  3  |   4    |
        turns     | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 | 0 | 1 | 2 |3|

    A bucket of a turn for each rank is divided among all.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_optim.plan.layout import Layout, aligned_offsets, rows_in_order, whole
from zero_optim.plan.partition import RankLoads

# For even buckets the fullest rank's load may be the mean times this.
TOLERATED = 1.05
# Latency dominates shorter messages on every transport.
MIN_ROW_NBYTES = 64 * 2**10
# A rank has at least so many rows, which makes the model even.
MIN_TURNS = 4
# The tolerated excess of a bucket's longest row over the mean, relative to the mean; a shorter part of a turn
# goes to its neighbour.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Planned:
    """The numbers of one plan by parameter index; ``steps``: elements between possible cuts, 0 for none.

    ``trains``: of each bucket. ``row_nbytes``: a row that is worth a message of the transport.
    """

    numels: Sequence[int]
    item_nbytes: Sequence[int]
    costs: Sequence[float]
    steps: Sequence[int]
    groups: Sequence[range]
    buckets: Sequence[Sequence[int]]
    alignments: Sequence[int]
    trains: Sequence[bool]
    row_nbytes: int

    def nbytes_of(self, bucket: Sequence[int]) -> list[int]:
        """Return the bytes of each parameter of a bucket."""
        return [self.numels[index] * self.item_nbytes[index] for index in bucket]

    def nbytes_in_order(self, number: int) -> int:
        """Return the bytes of a bucket with padding."""
        bucket = self.buckets[number]
        numels = (self.numels[index] for index in bucket)
        return aligned_offsets(numels, self.alignments[number])[-1] * self.item_nbytes[bucket[0]]


def row_nbytes(nbytes: int, num_ranks: int, most: int) -> int:
    """Return the bytes of a row, from those of a model and those of a row that is worth a message."""
    return max(MIN_ROW_NBYTES, min(most, nbytes // (MIN_TURNS * num_ranks)))


def choose_rows(planned: Planned, loads: Sequence[float], *, even_buckets: bool = True) -> list[Layout]:
    """Return every bucket's layout, from each rank's load: Note [Few owners]; or with only the model even."""
    turns, most_owners = _turns(planned, len(loads))
    in_cut = {index for number in turns for index in planned.buckets[number]}
    owners, ranks = _choose(planned, in_cut, loads, most_owners if even_buckets else None)
    of_cut = sum(planned.costs[index] for index in in_cut)
    tolerated = TOLERATED * (sum(loads) + sum(planned.costs)) / len(loads)
    if even_buckets and ranks.fullest() + of_cut / len(loads) > tolerated:
        of_model, ranks_of_model = _choose(planned, in_cut, loads, None)
        if ranks_of_model.fullest() < ranks.fullest():
            owners, ranks = of_model, ranks_of_model
    order, layouts = ranks.by_load(), []
    for number, bucket in enumerate(planned.buckets):
        numels, alignment = [planned.numels[index] for index in bucket], planned.alignments[number]
        if number in turns:
            rows = rows_in_order(numels, *_cut(planned, number, *turns[number], order), alignment)
            layouts.append(Layout(tuple(numels), rows))
        else:
            layouts.append(whole(numels, [owners[index] for index in bucket], alignment))
    return layouts


def _turns(planned: Planned, num_ranks: int) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return the begin and the turn, in bytes, of each bucket to cut, and the most owners of every bucket."""
    numbers = range(len(planned.buckets))
    nbytes, most_owners = list(map(planned.nbytes_in_order, numbers)), [num_ranks] * len(numbers)
    turns: dict[int, tuple[int, int]] = {}
    for kind in (True, False) if num_ranks > 1 else ():
        line = [number for number in numbers if planned.trains[number] is kind]
        least = row_nbytes(sum(nbytes[number] for number in line), num_ranks, planned.row_nbytes)
        line = [number for number in line if any(planned.steps[index] for index in planned.buckets[number])]
        for number in line:
            most_owners[number] = max(1, min(num_ranks, -(-nbytes[number] // least)))
        line = [number for number in line if _is_uneven(planned, number, most_owners[number])]
        turns |= {number: (0, -(-nbytes[number] // num_ranks)) for number in line}
        line = [number for number in line if most_owners[number] < num_ranks]
        rest = sum(nbytes[number] for number in line)
        turn = max(MIN_ROW_NBYTES, -(-rest // (num_ranks * max(1, rest // (num_ranks * least)))))
        begins = accumulate((nbytes[number] for number in line), initial=0)
        turns |= {number: (begin, turn) for number, begin in zip(line, begins, strict=False)}
    return turns, most_owners


def _is_uneven(planned: Planned, number: int, num_owners: int) -> bool:
    """Whether whole parameters make a bucket's fullest row much longer than the mean, and cuts may not."""
    bucket = planned.buckets[number]
    nbytes = planned.nbytes_of(bucket)
    mean, largest = sum(nbytes) / num_owners, max(nbytes)
    tolerated = max(MIN_ROW_NBYTES, TOLERANCE * mean)
    # Before its last parameter the fullest row was at most the mean: that decides most buckets.
    if largest <= tolerated or not planned.steps[bucket[nbytes.index(largest)]]:
        return False
    rows = RankLoads([0] * num_owners)
    rows.assign(nbytes)
    return rows.fullest() - mean > tolerated


def _choose(
    planned: Planned, in_cut: set[int], loads: Sequence[float], most_owners: Sequence[int] | None
) -> tuple[list[int], RankLoads]:
    """Return owners of the parameters that are not cut, and the loads: bucket by bucket, or by group."""
    ranks, owners = RankLoads(loads), [0] * len(planned.numels)
    for number, members in enumerate(planned.groups if most_owners is None else planned.buckets):
        whole_params = [index for index in members if index not in in_cut]
        costs = [planned.costs[index] for index in whole_params]
        if most_owners is None:
            chosen = ranks.assign(costs)
        else:
            chosen = ranks.assign(costs, planned.nbytes_of(whole_params), most_owners[number])
        for index, owner in zip(whole_params, chosen, strict=True):
            owners[index] = owner
    return owners, ranks


def _cut(
    planned: Planned, number: int, begin: int, turn: int, order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the owners and ends of rows, in elements; a row differs from its turn by at most a step."""
    bucket, alignment = planned.buckets[number], planned.alignments[number]
    numels, size = [planned.numels[index] for index in bucket], planned.item_nbytes[bucket[0]]
    *offsets, total = aligned_offsets(numels, alignment)
    small = int(TOLERANCE * turn)
    first = (begin + small) // turn
    stop = max(first + 1, -(-(begin + total * size - small) // turn))
    edges = [0, *((each * turn - begin) // size for each in range(first + 1, stop)), total]
    lengths = {
        order[each % len(order)]: end - start
        for each, (start, end) in zip(range(first, stop), pairwise(edges), strict=True)
    }
    target, owners, ends = 0, list[int](), [0]
    for owner in sorted(lengths):
        target += lengths[owner]
        index = bisect_right(offsets, target) - 1
        after = [*offsets, total][index + 1]
        end = _nearest(target, offsets[index], after, numels[index], planned.steps[bucket[index]])
        if end > ends[-1]:
            owners.append(owner)
            ends.append(end)
    return owners, ends[1:]


def _nearest(target: int, start: int, after: int, numel: int, step: int) -> int:
    below = start if step == 0 else start + (target - start) // step * step
    above = after if step == 0 else below + step
    if above >= start + numel:
        above = after
    if below >= start + numel:
        below = after
    return below if target - below <= above - target else above
