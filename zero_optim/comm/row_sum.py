"""Sums of rows: of W rows that every rank has, rank r receives the sum of everyone's row r.

That is a reduce-scatter, made of an exchange between all pairs of ranks and additions in the order of ranks.
So the bits do not depend on the backend, nor on what else is sent with a row, and rows may differ in length.
Measured on gloo with two ranks: over loopback it takes a third of the time of a reduce-scatter, and over a
link of 1 Gbit/s, with a lane for each sender, less than half.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup


class RowSum:
    """A sum of rows, under way. All ranks construct it, in the same order; communicates.

    Args:
        group: the ranks.
        lanes: groups of the same ranks for the exchange, see `RankGroup.exchange`.
        rows: by the rank that receives the sum: 1-D, contiguous, of one dtype and device. Row r has the same
            length on every rank. They are read until `wait` returns, and not changed.
    """

    def __init__(self, group: RankGroup, lanes: Sequence[RankGroup], rows: Sequence[Tensor]) -> None:
        self._rows = rows  # alive until they have been sent
        self._works, self._came = group.exchange(rows, lanes)

    def wait(self) -> Tensor:
        """Wait for what the others send, and add it up in the order of ranks; called once.

        Returns:
            The sum of this rank's row. In a group of one that is the row itself.
        """
        for work in self._works:
            work.wait()
        first, *others = self._came
        self._works, self._came, self._rows = [], [], ()
        if not others:
            return first
        total = torch.add(first, others[0])  # `first` may be this rank's own row
        for came in others[1:]:
            total += came
        return total
