"""Sums of rows that a test has as a list."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.comm.sending import Lanes
from zero_optim.flow.pending import Pending
from zero_optim.plan.slices import Slices


def start_sum_of(group: RankGroup, lanes: Lanes, rows: Sequence[Tensor]) -> Pending[Tensor]:
    """Start a sum of rows, by receiving rank."""
    slices = Slices(group.rank, tuple(row.numel() for row in rows))
    return start_row_sum(group, lanes, torch.cat(list(rows)), slices)
