"""A 2-D mesh of ranks: rows have owners in a replica, and each owner has copies across replicas.

Note [Numbers in a mesh]
    Owners of the same rows need the same group rank in all replicas, but process groups number ranks in
    rising order. So ranks must rise along rows and columns, as `init_device_mesh` makes them.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.hosts import find_hosts, make_together

_Table = list[list[int]]  # global ranks, by replica


@dataclass(frozen=True, slots=True, eq=False)
class RankMesh:
    """A model's ranks: ``inner`` is this replica, ``across`` the owners of the same rows in all."""

    everyone: RankGroup
    inner: RankGroup
    across: RankGroup

    @classmethod
    def make(cls, mesh: DeviceMesh | None, owners: RankGroup) -> "RankMesh | None":
        """Make it from a 2-D mesh; None without one, or for one replica. All ranks call; communicates."""
        with failing_together(owners):
            table = None if mesh is None else _table(mesh, owners)
        agree(owners, [f"mesh={table}"], "the mesh")
        if mesh is None or table is None or len(table) == 1:
            return None
        across = replace(RankGroup.of(mesh.get_group(0), owners.data_devices), phase=owners.phase)
        find_hosts(across)
        everyone = _make_everyone(sorted(rank for row in table for rank in row), owners, across)
        for part in (owners, across):
            part.works.log.wholes[part.works.ranks] = everyone.works.ranks
        return cls(everyone, owners, across)


def _table(mesh: object, owners: RankGroup) -> _Table:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 2:
        raise ValueError(
            f"expected a mesh of 2 dimensions, (replicas, ranks of a replica), got {mesh.ndim}: take "
            "two of a larger one, such as mesh['replicate', 'shard']"
        )
    table: _Table = mesh.mesh.tolist()
    if any(low >= high for line in (*table, *zip(*table, strict=True)) for low, high in pairwise(line)):
        raise ValueError(f"expected ranks that rise along rows and columns of the mesh, got {table}")
    ranks = list(owners.works.ranks)
    if ranks not in table:
        name = "1" if mesh.mesh_dim_names is None else repr(mesh.mesh_dim_names[1])
        is_all = ranks == sorted(rank for row in table for rank in row)
        hint = ". To shard over all its ranks, leave out mesh" if is_all else ""
        raise ValueError(
            f"expected an optimizer over one row of the mesh {table}, got one over ranks {ranks}: build it "
            f"with process_group=mesh.get_group({name}){hint}"
        )
    return table


def _make_everyone(ranks: list[int], inner: RankGroup, across: RankGroup) -> RankGroup:
    """Return the group of all ranks of a mesh, a new one if there is none. All call; communicates."""
    world = RankGroup.of(None, inner.data_devices).within(inner.phase.timeout)
    for known in (world, across):
        serves = {device.type for device in inner.data_devices} <= known.backends.keys()
        if serves and list(known.works.ranks) == ranks:
            return known
    token = across.all_gather_fixed(secrets.token_hex(8).encode())[0]
    token = inner.all_gather_fixed(token)[0]  # that of the first rank of all
    name, what = f"zero_optim:{token.decode()}", "could not create a process group of the whole mesh"
    process_group = make_together(inner, ranks, inner.data_backend, name, what)
    return RankGroup.of(process_group, inner.data_devices).within(inner.phase.timeout)


def agree_between_replicas(everyone: RankGroup, items: Sequence[str]) -> None:
    """Check that the replicas' optimizers are equal; all ranks of the mesh call. Raises as `agree`."""
    hint = "All replicas must divide parameters in the same way: build the optimizers with cuts=False, or on "
    hint += "equal machines"
    agree(everyone, items, "the optimizers of the replicas", {"parameter": hint})
