"""A 2-D mesh of ranks: rows have owners in a replica, and each owner has copies across replicas.

Note [Whose state it is]
    If the optimizer's ranks are one row of the mesh, each replica has all state. If they are all ranks, the
    state exists once, and a replica only gathers parameters; all else is that of one group.

Note [Numbers in a mesh]
    Owners of the same rows need the same group rank in all replicas, but process groups number ranks in
    rising order. So ranks must rise along rows and columns, as `init_device_mesh` makes them.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import agree, failing_together, find_memory, make_together
from zero_optim.comm.collectives import RankGroup

_Table = list[list[int]]  # global ranks, by replica


@dataclass(frozen=True, slots=True, eq=False)
class RankMesh:
    """The ranks of one model in replicas, each of which has everything once.

    ``inner``: this replica. ``across``: owners of the same rows in all replicas; if ``splits_state``
    (Note [Whose state it is]), ranks with the same number. ``places``: (replica, number) by rank of
    ``everyone``.
    """

    everyone: RankGroup
    inner: RankGroup
    across: RankGroup
    splits_state: bool = False
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh | None, owners: RankGroup, *, may_split: bool = False) -> "RankMesh | None":
        """Build it from a 2-D mesh (replicas, ranks of a replica). All ranks call; communicates.

        ``owners``: the optimizer's ranks, this replica or, if it ``may_split``, all. Returns None without a
        mesh or for one replica. A mesh that does not fit raises on every rank of ``owners``.
        """
        with failing_together(owners):
            table = None if mesh is None else _table(mesh, owners, may_split=may_split)
        agree(owners, [f"mesh={table}"], "the mesh")
        if mesh is None or table is None or len(table) == 1:
            return None
        across = _part(mesh, 0, owners)
        ranks = sorted(rank for row in table for rank in row)
        splits = list(owners.works.ranks) == ranks
        inner = _part(mesh, 1, owners) if splits else owners
        everyone = owners if splits else _everyone(ranks, inner, across)
        places = {rank: (row, number) for row, line in enumerate(table) for number, rank in enumerate(line)}
        replicas = cls(everyone, inner, across, splits, tuple(places[rank] for rank in ranks))
        for part in (inner, across):
            part.works.log.wholes[part.works.ranks] = replicas.everyone.works.ranks
        return replicas

    def owned_by(self, owners: RankGroup) -> "RankMesh":
        """Return the same ranks for another optimizer with the same process group."""
        return replace(self, everyone=owners) if self.splits_state else replace(self, inner=owners)

    @property
    def of_owners(self) -> "RankMesh | None":
        """The mesh, if others own the same rows; else None."""
        return None if self.splits_state else self


def _part(mesh: DeviceMesh, dimension: int, owners: RankGroup) -> RankGroup:
    part = replace(RankGroup.of(mesh.get_group(dimension), owners.data_devices), phase=owners.phase)
    find_memory(part)
    return part


def _table(mesh: object, owners: RankGroup, *, may_split: bool) -> _Table:
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
    is_all = ranks == sorted(rank for row in table for rank in row)
    if ranks not in table and not (may_split and is_all):
        name = "1" if mesh.mesh_dim_names is None else repr(mesh.mesh_dim_names[1])
        or_all = ", or over all its ranks" if may_split else ""
        why = (
            ". State over all ranks of a mesh is for FullyShardedDataParallel: where parameters are whole on "
            "every rank it needs no mesh"
        )
        raise ValueError(
            f"expected an optimizer over one row of the mesh {table}{or_all}, got one over ranks {ranks}: "
            f"build it with process_group=mesh.get_group({name}){why if is_all else ''}"
        )
    return table


def _everyone(ranks: list[int], inner: RankGroup, across: RankGroup) -> RankGroup:
    world = RankGroup.of(None, inner.data_devices).within(inner.phase.timeout)
    for known in (world, across):
        serves = {device.type for device in inner.data_devices} <= known.backends.keys()
        if serves and list(known.works.ranks) == ranks:
            return known
    return made_over(ranks, inner, across)


def agree_between_replicas(everyone: RankGroup, items: Sequence[str]) -> None:
    """Check that the replicas' optimizers are equal; all ranks of the mesh call. Raises as `agree`."""
    hint = "Replicas must plan alike: build the optimizers with cuts=False, or on equal machines"
    agree(everyone, items, "the optimizers of the replicas", {"parameter": hint})


def made_over(ranks: Sequence[int], inner: RankGroup, across: RankGroup) -> RankGroup:
    """Make a process group of all ranks of a mesh. All call; communicates."""
    token = across.all_gather_fixed(secrets.token_hex(8).encode())[0]
    token = inner.all_gather_fixed(token)[0]  # that of the first rank of all
    name, what = f"zero_optim:{token.decode()}", "no process group of the whole mesh could be made"
    process_group = make_together(inner, ranks, inner.data_backend, name, what)
    return RankGroup.of(process_group, inner.data_devices).within(inner.phase.timeout)
