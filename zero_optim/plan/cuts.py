"""Cuts inside parameters that make a bucket's rows equally long. Pure arithmetic, no torch.

    flat    | 0 0 0 0 0 0 0 0 0 0 0 0 0 . 1 1 |      "." is padding that aligns the next parameter
    rows    '---rank 2---'---rank 5---'-rank 7-'

Cuts lie between rows of dimension 0, at aligned addresses, where kernels run as at a tensor's begin.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from zero_optim.plan.layout import aligned_offsets
from zero_optim.plan.partition import fullest_row

# Shorter messages take hardly less time, as latency dominates.
MIN_ROW_NBYTES = 64 * 2**10
# A plan has at most this many rows, beside one for each bucket. For 16,384 ranks a row is then at least a
# sixteenth of a rank's part.
MAX_ROWS = 2**18
# The excess of a bucket's longest row over the mean that is tolerated, relative to the mean.
TOLERANCE = 0.05
# Cuts must remove at least this part of the longest row's excess over the mean.
GAIN = 0.25


def min_row_nbytes(nbytes: int) -> int:
    """Return the minimum bytes of a cut row, for this many planned bytes."""
    return max(MIN_ROW_NBYTES, nbytes // MAX_ROWS)


def cut_step(numel: int, num_rows: int, alignment: int) -> int:
    """Return the elements between two possible cuts: whole rows, aligned."""
    return math.lcm(numel // num_rows, alignment)


def is_uneven(nbytes: Sequence[int], num_ranks: int, min_nbytes: int) -> bool:
    """Whether whole parameters make a bucket's fullest row much longer than the mean."""
    mean = sum(nbytes) / num_ranks
    tolerated = max(min_nbytes, TOLERANCE * mean)
    # Before its last parameter the fullest row was at most the mean, so this test settles most buckets.
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
    """Return the possible cut nearest to a target."""
    below = start if step == 0 else start + (target - start) // step * step
    above = after if step == 0 else below + step
    if above >= start + numel:
        above = after
    if below >= start + numel:
        below = after
    return below if target - below <= above - target else above


def is_worth_it(nbytes: Sequence[int], num_ranks: int, longest: int) -> bool:
    """Whether cut rows are clearly more even than whole parameters; long parameter rows limit the cuts."""
    mean = sum(nbytes) / num_ranks
    return longest - mean <= (1 - GAIN) * (fullest_row(nbytes, num_ranks) - mean)


def longest_row(ends: Sequence[int]) -> int:
    """Return the elements of the longest row."""
    return max((stop - start for start, stop in pairwise([0, *ends])), default=0)
