"""How the rows of a bucket get to their owners, who keep the sums."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowSum
from zero_optim.comm.traffic import Waitable


class SumRoute(Protocol):
    """The way of one bucket: each portion is summed inside the replica, then perhaps across replicas.

    All ranks call, in the same order.
    """

    @property
    def goes_across(self) -> bool:
        """Whether there is anything to sum across replicas."""
        ...

    def start(self, rows: Sequence[Tensor], label: str) -> Waitable:
        """Start the sum of a portion inside the replica, in place in the row of this rank.

        Args:
            rows: by owner.
            label: names the portion in messages.
        """
        ...

    def start_across(self, own: Tensor, label: str) -> None:
        """Start the sum across replicas, in place, when all portions are summed inside.

        Args:
            own: the row of this rank, with the sum of the replica.
            label: names the bucket in messages.
        """
        ...

    def wait_across(self) -> None:
        """Wait for the sum across replicas."""
        ...

    def abandon(self) -> None:
        """Let nobody else have the lanes, because something failed on them."""
        ...


class DirectRoute:
    """To owners in this replica. Their sums go on across replicas, over the owners of the same rows.

    See Note [Sums across replicas] in `zero_optim.ddp.owners.owner_line`.

    Args:
        group: the ranks of this replica.
        lanes: see `RowSum`.
        across: owners of the same rows in all replicas; None if there is one alone.
    """

    def __init__(self, group: RankGroup, lanes: Lease, across: RankGroup | None = None) -> None:
        self._group = group
        self._lanes = lanes
        self._across = across
        self._work: Waitable | None = None

    @property
    def goes_across(self) -> bool:
        """See `SumRoute`."""
        return self._across is not None

    def start(self, rows: Sequence[Tensor], label: str) -> Waitable:
        """See `SumRoute`."""
        return RowSum(self._group, self._lanes.groups, rows, in_place=True, about=label)

    def start_across(self, own: Tensor, label: str) -> None:
        """See `SumRoute`."""
        if self._across is not None and own.numel():  # the others have as many
            _, self._work = self._across.start_sum(own, f"{label}, across replicas")

    def wait_across(self) -> None:
        """See `SumRoute`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def abandon(self) -> None:
        """See `SumRoute`."""
        self._lanes.abandon()
