"""Process groups of the same ranks as another, lent to one user at a time.

Note [Lanes]
    Collectives of two threads on one process group mix. So code beside the main thread uses its own groups:
    lanes. A gloo group costs three threads, so a user borrows lanes until its `Lease` is dropped. Ranks agree
    which lanes are free. A failed rank may have started fewer collectives, which would pair later ones
    wrongly: a user abandons its lanes after a failure, and a lane is lent only if ranks started as many.

Note [Lanes end with the default group]
    PyTorch names a group by the number of groups in the process: if one rank destroyed a lane earlier, names
    would differ and ranks would hang. So lanes are not destroyed, and ranks agree on names.
"""

import gc
import secrets
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.backends import transport_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.hosts import find_hosts, make_together
from zero_optim.compat.autograd import timeout_of
from zero_optim.errors import RankMismatchError


class Lease:
    """One user's right to some lanes, until this object is dropped."""

    def __init__(self, lanes: Mapping[str, RankGroup], free: "_Free") -> None:
        self.groups = tuple(lanes.values())
        # A finalizer may run anywhere, even within the garbage collector. This one only changes a dict.
        self._end = weakref.finalize(self, free.update, dict.fromkeys(lanes))
        self._end.atexit = False

    @classmethod
    def of(cls, group: RankGroup) -> "Lease":
        """Wrap a group that is not a lane; its end does nothing."""
        return cls({"": group}, {})

    def __enter__(self) -> None:
        """Begin a use: if it raises, `abandon`."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.abandon()

    def abandon(self) -> None:
        """Never lend these lanes again, after a failure. No communication."""
        self._end.detach()


# Names of lanes that are free, in order.
_Free: TypeAlias = dict[str, None]


@dataclass(slots=True)
class _Pool:
    lanes: WeakValueDictionary[str, dist.ProcessGroup] = field(default_factory=WeakValueDictionary)
    free: _Free = field(default_factory=dict)

    def offer(self) -> _Free:
        """Take all free lanes out, so that no other thread offers them too."""
        offered = {name: self.free.pop(name) for name in list(self.free)}
        return {name: None for name in offered if name in self.lanes}


# By the default group, then by ranks, backend and timeout. PyTorch keeps groups in globals, so this has to be
# a global too. It is weak, so that it ends with the default group.
_POOLS: WeakKeyDictionary[dist.ProcessGroup, dict[object, _Pool]] = WeakKeyDictionary()


def lanes_beside(group: RankGroup) -> Lease:
    """Take lanes for a group's data, one a rank up to `Transport.most_lanes`; as `lease`."""
    backend, devices = group.data_backend, group.data_devices
    is_shared = devices and all(group.shared_memory(device) is not None for device in devices)
    most = 1 if is_shared else transport_of(backend, torch.device("cpu")).most_lanes
    return lease(group, min(group.size, most), backend)


def host_lanes_beside(group: RankGroup) -> Lease:
    """Take lanes as `lanes_beside`, for CPU tensors alone."""
    return lanes_beside(replace(group, data_devices=(torch.device("cpu"),)))


def lanes_for_rows(group: RankGroup, params: Iterable[Tensor]) -> Lease:
    """Take lanes for CPU gradients of ``params``, else the group: on accelerators two may deadlock."""
    return lanes_beside(group) if may_run_beside(group, params) else Lease.of(group)


def may_run_beside(group: RankGroup, params: Iterable[Tensor]) -> bool:
    """Return whether another thread may use lanes beside a group, for CPU tensors."""
    devices = {torch.device("cpu")} | {param.device for param in params}
    return all(group.transport(device).lets_threads for device in devices)


def lease(group: RankGroup, number: int, backend: str) -> Lease:
    """Take lanes with a group's ranks and timeout; all ranks call; RankMismatchError if they differ."""
    world = dist.group.WORLD
    assert world is not None  # there is a group, so there is a default group
    ranks, what = group.works.ranks, "could not create more process groups of the same ranks"
    key = (ranks, backend, timeout_of(group.process_group))
    pool = _POOLS.setdefault(world, {}).setdefault(key, _Pool())
    offered = pool.offer()
    try:
        everyone, common = _exchange(group, pool, offered, number, backend)
        if len(common) < number and max(wish["made"] for wish in everyone) >= 16:
            gc.collect()  # which may hold lanes; takes some 0.1 s, so the first ones are made without it
            offered |= pool.offer()
            everyone, common = _exchange(group, pool, offered, number, backend)
        chosen = common[:number]
        for index in range(number - len(chosen)):
            name = f"zero_optim:{everyone[0]['token']}:{index}"
            pool.lanes[name] = make_together(group, ranks, backend, name, what)
            find_hosts(RankGroup.of(pool.lanes[name]).within(group.phase.timeout))
            offered[name] = None
            chosen.append(name)
        for name in chosen:
            del offered[name]
        lanes = {name: RankGroup.of(pool.lanes[name], group.data_devices) for name in chosen}
        return Lease({name: replace(lane, phase=group.phase) for name, lane in lanes.items()}, pool.free)
    finally:
        pool.free.update(offered)


def _exchange(
    group: RankGroup, pool: _Pool, offered: Collection[str], number: int, backend: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Gather what the ranks want and have; the names are of lanes that are free on all."""
    wish = {
        "want": f"{number} on {backend}",
        "free": {name: num_started(RankGroup.of(pool.lanes[name])) for name in sorted(offered)},
        "made": len(pool.lanes),
        "token": secrets.token_hex(8),
    }
    everyone: list[dict[str, Any]] = group.all_gather_json(wish)
    if len({str(wish["want"]) for wish in everyone}) > 1:
        wishes = zip(group.numbers, everyone, strict=True)
        wants = "; ".join(f"rank {rank} wants {wish['want']}" for rank, wish in wishes)
        raise RankMismatchError(f"ranks disagree about the process groups that they need: {wants}")
    free: dict[str, int] = everyone[0]["free"]
    common = (
        name for name, count in free.items() if all(wish["free"].get(name) == count for wish in everyone)
    )
    return everyone, list(common)


def num_started(lane: RankGroup) -> int:
    """Return how many collectives a lane started, equal on all ranks; an exchange counts once."""
    count = getattr(lane.process_group, "_get_sequence_number_for_group", None)
    in_memory = 0 if lane.works.memory is None else lane.works.memory.num_started
    return in_memory + (int(count()) - lane.works.apart if count is not None else 0)
