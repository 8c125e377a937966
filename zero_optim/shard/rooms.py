"""Rooms for stamps in the buckets of a plan, so that every rank is heard. Nothing here communicates.

Note [Every rank is heard]
    Each row has room for a stamp, except one that lies within one parameter. A rank that owns nothing,
    nothing that trains, or such rows alone has a room behind the rows of one bucket, and broadcasts these
    32 bytes by itself, beside the owners' broadcasts. One sum or all-gather for all such ranks would be one
    collective, but on gloo more messages, one after the other. Where all ranks have room in their rows, as
    in most plans, nothing is added.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.health.stamp import STAMP_NBYTES
from zero_optim.plan.layout import Layout, with_rooms, with_rooms_behind
from zero_optim.plan.plan import Plan, alignment_of


def layouts_with_rooms(
    plan: Plan,
    params: Sequence[Tensor],
    size: int,
    units: Mapping[Tensor, int],
    compute_dtypes: Mapping[Tensor, torch.dtype],
    heard: set[int],
) -> list[Layout]:
    """Return the layouts of a plan with rooms, by bucket; the same on every rank.

    Args:
        plan: the plan; ranks agree on which of its parameters are frozen.
        params: of the plan.
        size: number of ranks. One alone has no stamps, and its layouts stay as they are.
        units: the parameters of units, each with the number of its unit.
        compute_dtypes: of those that travel in another dtype than their own, which is wider.
        heard: ranks with room in a bucket that is gathered after each step; those of this plan are added.
    """
    firsts = [params[bucket.params[0]] for bucket in plan.buckets]
    layouts = [bucket.layout for bucket in plan.buckets]
    if size == 1:
        return layouts
    lengths = [-(-STAMP_NBYTES // compute_dtypes.get(first, first.dtype).itemsize) for first in firsts]
    alignments = list(map(alignment_of, firsts))
    layouts = list(map(with_rooms, layouts, lengths, alignments))
    trained = [
        number for number, first in enumerate(firsts) if first.requires_grad and layouts[number].end_of_rows
    ]
    heard.update(room.owner for number in trained for room in layouts[number].rooms)
    silent = [rank for rank in range(size) if rank not in heard]
    if silent and trained:
        # What is gathered first. The outermost unit has the lowest number, and parameters of no unit are
        # gathered in the step.
        chosen = min(trained, key=lambda number: units.get(firsts[number], -1))
        layout = layouts[chosen]
        layouts[chosen] = with_rooms_behind(layout, silent, lengths[chosen], alignments[chosen])
        heard.update(silent)
    return layouts
