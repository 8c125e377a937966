"""Header space for stamps in a plan's buckets. No communication.

Note [Every rank is heard]
    Each row has space for a stamp, except one within a single parameter. A rank without such a row that
    trains gets space behind one bucket's rows, and broadcasts these 32 bytes beside the owners; on gloo an
    all-gather would take more messages. Most plans need no extra space.
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
    """Return the plan's layouts with header space, by bucket; the same on every rank.

    ``compute_dtypes``: parameters that travel in a narrower dtype. ``heard``: ranks with space in a bucket
    gathered after each step, extended by this plan's.
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
        # The bucket gathered first: parameters outside units, in the step, else the outermost unit, which
        # has the lowest number.
        chosen = min(trained, key=lambda number: units.get(firsts[number], -1))
        layout = layouts[chosen]
        layouts[chosen] = with_rooms_behind(layout, silent, lengths[chosen], alignments[chosen])
        heard.update(silent)
    return layouts
