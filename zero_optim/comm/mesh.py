"""A 2-D mesh of ranks: replicas, inside of which rows have owners, and copies of these owners across.

Note [Numbers in a mesh]
    An owner is a rank within its replica. The owners of the same rows in all replicas must have the same
    number there, but a process group numbers its ranks as they rise, whatever the mesh has in its order. So
    a mesh is refused whose ranks do not rise along its rows and columns; `init_device_mesh` makes none.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import make_group, timeout_of

_Table = list[list[int]]  # global ranks, by replica


@dataclass(frozen=True, slots=True, eq=False)
class RankMesh:
    """The ranks that train one model, as replicas, each of which holds everything once.

    Attributes:
        everyone: all ranks.
        inner: those of this replica; they own what they own for themselves.
        across: those that own the same in all replicas, by the replica's number.
    """

    everyone: RankGroup
    inner: RankGroup
    across: RankGroup

    @classmethod
    def of(cls, mesh: DeviceMesh | None, inner: RankGroup) -> "RankMesh | None":
        """Find the ranks of a mesh; all ranks of it call. Communicates.

        Makes a process group where there is none of all ranks.

        Args:
            mesh: 2-D, (replicas, ranks of a replica); None for none.
            inner: the ranks of this replica.

        Returns:
            None without a mesh, and where there is one replica alone.

        Raises:
            TypeError: on every rank of the replica: it is no mesh.
            ValueError: likewise: it has another number of dimensions or another order, see Note [Numbers in a
                mesh]; or ``inner`` has other ranks than this rank's row.
            RankMismatchError: likewise: ranks have different ones.
        """
        with failing_together(inner):
            table = None if mesh is None else _table(mesh, inner)
        agree(inner, [f"mesh={table}"], "the mesh")
        if mesh is None or table is None or len(table) == 1:
            return None
        across = RankGroup.of(mesh.get_group(0), inner.data_devices).within(inner.phase.timeout)
        found = cls(_everyone(table, inner, across), inner, across)
        for part in (inner, across):
            part.works.log.wholes[part.works.ranks] = found.everyone.works.ranks
        return found


def _table(mesh: object, inner: RankGroup) -> _Table:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 2:
        raise ValueError(
            f"expected a mesh of 2 dimensions, (replicas, ranks of a replica), got {mesh.ndim}: take "
            "two of a larger one, such as mesh['replicate', 'shard']"
        )
    table: _Table = mesh.mesh.tolist()
    if not all(_rises(line) for line in (*table, *zip(*table, strict=True))):
        raise ValueError(f"expected ranks that rise along rows and columns of the mesh, got {table}")
    ranks = list(inner.works.ranks)
    if ranks not in table:
        name = "1" if mesh.mesh_dim_names is None else repr(mesh.mesh_dim_names[1])
        raise ValueError(
            f"expected an optimizer over one row of the mesh {table}, got one over ranks {ranks}: build it "
            f"with process_group=mesh.get_group({name})"
        )
    return table


def _rises(line: Sequence[int]) -> bool:
    return all(low < high for low, high in pairwise(line))


def _everyone(table: _Table, inner: RankGroup, across: RankGroup) -> RankGroup:
    """Find a group of all ranks of a mesh, or make one."""
    ranks = sorted(rank for row in table for rank in row)
    world = RankGroup.of(None, inner.data_devices).within(inner.phase.timeout)
    for known in (world, across):
        if list(known.works.ranks) == ranks and all(map(known.backend_of, inner.data_devices)):
            return known
    return made_over(ranks, inner, across)


def made_over(ranks: Sequence[int], inner: RankGroup, across: RankGroup) -> RankGroup:
    """Make a process group of all ranks of a mesh, which call; communicates.

    Args:
        ranks: global ranks, rising.
        inner: those of this rank's row.
        across: those of its column.

    Raises:
        RemoteRankError: a rank does not answer within the timeout, or has ended.
    """
    token = across.all_gather_fixed(secrets.token_hex(8).encode())[0]
    token = inner.all_gather_fixed(token)[0]  # that of the first rank of all
    name, timeout = f"zero_optim:{token.decode()}", timeout_of(inner.process_group)
    try:
        made = make_group(ranks, inner.data_backend, name, timeout)
    except RuntimeError as error:
        raise across.unanswered("no process group of the whole mesh could be made", error) from error
    return RankGroup.of(made, inner.data_devices).within(inner.phase.timeout)
