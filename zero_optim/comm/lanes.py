"""Process groups beside a given one, of the same ranks, lent to one user at a time.

Note [Lanes]
    Collectives of two threads on one process group mix, so whoever communicates beside the main thread has
    groups of its own: lanes. A gloo group takes three threads and several descriptors for as long as it
    lives, so lanes are not made for each user anew. They are kept, and lent: a user has them until it
    drops its `Lease`, then the next one gets the same.

    Leases are dropped when Python collects garbage, and that is at another time on every rank. So the ranks
    tell each other which lanes are free, and take those that are free on all.

    A rank that failed may have launched less on its lanes than the others, and what came next there would be
    paired with the wrong thing. So a user that saw a failure abandons its lanes, and only lanes with as many
    collectives on every rank are lent.

    Lanes end when the default group is destroyed, and all groups with it. They are not destroyed before:
    PyTorch names a group that is made on its members alone by how many groups this process has, so one
    that was destroyed at another time on another rank could make later names differ. For the same reason
    lanes get names that the ranks agree on here: names by number of groups differ, and ranks wait for each
    other in vain, as soon as one of them is a member of more groups than another.

    That lanes outlive their users also means that no thread of gloo is the last to hold one. It must not be:
    the end of a group waits for its threads.
"""

import gc
import json
import secrets
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import make_group, timeout_of
from zero_optim.errors import RankMismatchError

# As many lanes are made without looking whether garbage holds some: looking takes some 0.1 s.
_MADE_FREELY = 16
_MOST = 8  # lanes of a user on gloo


class Lease:
    """Lanes that one user has for itself, until this object is dropped.

    Args:
        lanes: by name.
        free: where the names go when the lease ends; from any thread.

    Attributes:
        groups: the lanes.
    """

    def __init__(self, lanes: Mapping[str, RankGroup], free: set[str]) -> None:
        self.groups = tuple(lanes.values())
        # A finalizer may run anywhere, within the collector too. This one changes a set, nothing else.
        self._end = weakref.finalize(self, free.update, tuple(lanes))
        self._end.atexit = False

    @classmethod
    def of(cls, group: RankGroup) -> "Lease":
        """Stand for a group that is nobody's lane; it may be used as it is."""
        return cls({"": group}, set())

    def abandon(self) -> None:
        """Let nobody have these lanes after this user: something failed on them. Does not communicate."""
        self._end.detach()


@dataclass(slots=True)
class _Pool:
    """The lanes of some ranks, and the names of those that nobody has on this rank.

    The lanes themselves are held by PyTorch, which has every group registered until it is destroyed.
    """

    lanes: WeakValueDictionary[str, dist.ProcessGroup] = field(default_factory=WeakValueDictionary)
    free: set[str] = field(default_factory=set)

    def offer(self) -> set[str]:
        """Take out all that is free, so that no other thread offers it at the same time."""
        free = self.free.copy()
        self.free -= free
        return {name for name in free if name in self.lanes}

    def lend(self, names: Iterable[str]) -> Lease:
        return Lease({name: RankGroup.of(self.lanes[name]) for name in names}, self.free)


# By the default group, then by ranks, backend and timeout. PyTorch keeps groups in globals, so what is known
# of them has to be kept in one too; weakly, so that it ends with them.
_POOLS: WeakKeyDictionary[dist.ProcessGroup, dict[object, _Pool]] = WeakKeyDictionary()


def lanes_beside(group: RankGroup) -> Lease:
    """Have lanes of the backend of a group, for what must not wait in the group's own line; all ranks call.

    One for each rank on gloo, up to eight, as a gloo group sends for few ranks at a time; one on NCCL,
    whose groups must not run at the same time. Raises as `lease` does.
    """
    number = min(group.size, _MOST) if group.device.type == "cpu" else 1
    return lease(group, number, dist.get_backend(group.process_group))


def lease(group: RankGroup, number: int, backend: str) -> Lease:
    """Have some lanes: groups of the same ranks, with the timeout of the given one; all ranks call.

    Communicates on ``group``; a lane that has to be made takes some 20 ms.

    Args:
        group: the ranks.
        number: how many lanes.
        backend: of the lanes, such as ``"gloo"``.

    Raises:
        RankMismatchError: on every rank, if they want different lanes.
        RemoteRankError: a rank does not answer within the timeout, or has ended.
    """
    pool = _pool_of(group, backend)
    offered = pool.offer()
    try:
        everyone = _exchange(group, pool, offered, number, backend)
        if len(_common(everyone)) < number and max(told["made"] for told in everyone) >= _MADE_FREELY:
            gc.collect()
            offered |= pool.offer()
            everyone = _exchange(group, pool, offered, number, backend)
        chosen = _common(everyone)[:number]
        for index in range(number - len(chosen)):
            name = f"zero_optim:{everyone[0]['token']}:{index}"
            pool.lanes[name] = _made(group, backend, name)
            offered.add(name)
            chosen.append(name)
        offered.difference_update(chosen)
        return pool.lend(chosen)
    finally:
        pool.free |= offered


def _pool_of(group: RankGroup, backend: str) -> _Pool:
    world = dist.group.WORLD
    assert world is not None  # there is a group, so there is a default one
    ranks = dist.get_process_group_ranks(group.process_group)
    key = (tuple(ranks), backend, timeout_of(group.process_group))
    return _POOLS.setdefault(world, {}).setdefault(key, _Pool())


def _exchange(
    group: RankGroup, pool: _Pool, offered: set[str], number: int, backend: str
) -> list[dict[str, Any]]:
    """Tell every rank what this one wants and has free; by rank.

    Returns:
        ``want``; ``free``, by name the number of collectives launched; ``made``, how many lanes there are;
        ``token``, which no other lease has.
    """
    told = {
        "want": f"{number} on {backend}",
        "free": {name: _num_launched(pool.lanes[name]) for name in sorted(offered)},
        "made": len(pool.lanes),
        "token": secrets.token_hex(8),
    }
    payloads = group.all_gather_bytes(json.dumps(told).encode())
    everyone: list[dict[str, Any]] = [json.loads(payload) for payload in payloads]
    if len({str(told["want"]) for told in everyone}) > 1:
        wants = "; ".join(f"rank {rank} wants {told['want']}" for rank, told in enumerate(everyone))
        raise RankMismatchError(f"ranks disagree about the process groups that they need: {wants}")
    return everyone


def _common(everyone: list[dict[str, Any]]) -> list[str]:
    """List the lanes that are free on every rank, with as much launched on each; alike on every rank."""
    return [
        name
        for name, launched in everyone[0]["free"].items()
        if all(told["free"].get(name) == launched for told in everyone)
    ]


def _num_launched(lane: dist.ProcessGroup) -> int:
    count = getattr(lane, "_get_sequence_number_for_group", None)
    return int(count()) if count is not None else 0


def _made(group: RankGroup, backend: str, name: str) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group.process_group)
    try:
        return make_group(ranks, backend, name, timeout_of(group.process_group))
    except RuntimeError as error:
        raise group.unanswered("no process groups could be made beside the one given", error) from error
