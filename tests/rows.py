"""Sums of rows that a test has as a list."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.comm.sending import Lanes
from zero_optim.flow.pending import Pending
from zero_optim.plan.slices import Slices


def start_sum_of(
    group: RankGroup, lanes: Lanes, rows: Sequence[Tensor], *, in_place: bool = False
) -> Pending[Tensor]:
    """Start a sum of rows, by receiving rank; ``in_place``: the value is this rank's row of a copy."""
    slices = Slices(group.rank, tuple(row.numel() for row in rows))
    flat = torch.cat(list(rows))
    return start_row_sum(group, lanes, flat, slices, slices.row(flat) if in_place else None)
