"""Rooms for stamps in the buckets of a plan, so that every rank is heard. Nothing here communicates.

Note [Every rank is heard]
    Each row has room for a stamp, but a row that lies within one parameter. So a rank has nowhere to write if
    it owns nothing, nothing that trains, or rows in the middle of large parameters alone. Such a rank has a
    room behind the rows of one bucket, and broadcasts that by itself: 32 bytes beside the broadcasts of the
    owners, and started with them. Where all ranks have room in their rows, as in most plans, nothing is
    added.

    It cannot travel with anything else: such a rank sends nothing in a step, or rows that have to be received
    where no byte is to spare. One sum or all-gather of the stamps of all such ranks would be one collective
    in the place of several. But on gloo it would be more messages, one after the other round a ring, than
    their broadcasts, which go side by side along trees. And where a backend takes several collectives as one,
    they are in the launch of the rows.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.health.stamp import STAMP_NBYTES
from zero_optim.plan.layout import Layout
from zero_optim.plan.plan import Plan, alignment_of
from zero_optim.plan.rooms import with_rooms, with_rooms_behind


def layouts_with_rooms(
    plan: Plan,
    params: Sequence[Tensor],
    size: int,
    units: Mapping[Tensor, int],
    compute_dtypes: Mapping[Tensor, torch.dtype],
    heard: set[int],
) -> list[Layout]:
    """Make rooms in the layouts of a plan; the same on every rank.

    Args:
        plan: the plan; ranks agree on which of its parameters are frozen.
        params: of the plan.
        size: number of ranks. One alone has no stamps, and its layouts stay as they are.
        units: the parameters of units, each with the number of its unit.
        compute_dtypes: of those that travel in another dtype than their own, which is wider.
        heard: ranks that have room in a bucket that is gathered after each step, of earlier plans; those of
            this one are added.

    Returns:
        By bucket of the plan.
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
