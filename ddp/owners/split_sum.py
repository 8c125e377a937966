"""Sums of gradients whose owners are ranks of all replicas of a mesh.

Note [Sums inside, then across]
    With state over all ranks of a mesh (Note [Whose state it is] in `zero_optim.comm.mesh`) each rank owns a
    row of a bucket. To exchange all rows among all ranks would send most of the bytes across the slow
    network. So rows are summed twice. Inside a replica of S ranks, rank s receives the rows of its column,
    which are those of the ranks with its number in all R replicas, and adds up in the order of ranks. Then
    the ranks of the column exchange these sums, and each adds up what came for its own row, in the order of
    replicas. In bf16 and fp16 either sum is rounded once. That sends (R - 1) / (R S) of the gradients' bytes
    across, half of what an all-reduce of the column's rows takes. On two replicas it has the bits of that.

    Portions go on one after the other: when one is summed inside, its second exchange starts, and all of
    these are waited for one bucket later, as in Note [Sums across replicas] of `owner_line`. Until then the
    sums of the column's other rows are held, 1/S of the bucket.
"""

from collections.abc import Sequence

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.row_sum import RowSum


class _PortionSum:
    """One portion on its way to its owners.

    Args:
        inner: the ranks of this replica.
        across: those of this rank's column.
        lanes: for either exchange, as of `RowSum`.
        rows: by replica and number, those of the owners there.
        label: names it in messages.
    """

    def __init__(
        self,
        inner: RankGroup,
        across: RankGroup,
        lanes: tuple[Lease, Lease],
        rows: Sequence[Sequence[Tensor]],
        label: str,
    ) -> None:
        self._across = across
        self._lanes = lanes[1]
        self._label = label
        self._inside = [
            RowSum(inner, lanes[0].groups, of_replica, in_place=True, about=label) for of_replica in rows
        ]
        self._total: RowSum | None = None

    def wait(self) -> None:
        """Wait for the sums of this replica, and start those across."""
        inside, self._inside = self._inside, []
        sums = [each.wait() for each in inside]
        label = f"{self._label}, across replicas"
        self._total = RowSum(self._across, self._lanes.groups, sums, in_place=True, about=label)

    def wait_across(self) -> None:
        """Wait for the sum, which is in the row of this rank then."""
        assert self._total is not None  # it was waited for inside
        self._total.wait()


class SplitRoute:
    """To owners in all replicas: Note [Sums inside, then across].

    Args:
        inner: the ranks of this replica.
        across: those of this rank's column.
        lanes: for exchanges among the first, and among the second.
        mesh: all ranks.
    """

    goes_across = True

    def __init__(
        self, inner: RankGroup, across: RankGroup, lanes: tuple[Lease, Lease], mesh: RankMesh
    ) -> None:
        self._inner = inner
        self._across = across
        self._lanes = lanes
        self._places = mesh.places
        self._portions: list[_PortionSum] = []

    def start(self, rows: Sequence[Tensor], label: str) -> _PortionSum:
        """See `SumRoute`. Rows are those of all ranks of the mesh."""
        by_place = dict(zip(self._places, rows, strict=True))
        replicas, numbers = range(self._across.size), range(self._inner.size)
        by_replica = [[by_place[replica, number] for number in numbers] for replica in replicas]
        portion = _PortionSum(self._inner, self._across, self._lanes, by_replica, label)
        self._portions.append(portion)
        return portion

    def start_across(self, own: Tensor, label: str) -> None:
        """Do nothing: each portion has started its own."""

    def wait_across(self) -> None:
        """See `SumRoute`."""
        for portion in self._portions:
            portion.wait_across()
        self._portions = []

    def abandon(self) -> None:
        """See `SumRoute`."""
        for lease in self._lanes:
            lease.abandon()
