"""Which ranks of a group share a host, and the process groups inside hosts and across."""

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_optim.comm.backends import ON_HOST, backend_for, late_or_closed
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_text
from zero_optim.comm.sending import Levels
from zero_optim.compat.autograd import make_group, timeout_of
from zero_optim.compat.streams import StreamBeside
from zero_optim.errors import RemoteRankError, message_of
from zero_optim.host.meeting import Met, open_shared_memory

logger = logging.getLogger("zero_optim")


def find_hosts(group: RankGroup) -> None:
    """Find out once which ranks share a host, and how these send. All ranks call; communicates once."""
    works, transports = group.works, {kind: group.transport(torch.device(kind)) for kind in group.backends}
    others = {kind: each.name for kind, each in transports.items() if not each.shares_host_memory}
    if group.size == 1 or not (others or works.log.shares_memory):
        return

    def connect(ranks: Sequence[int], name: str, backend: str = ON_HOST) -> dist.ProcessGroup:
        what = "no process group could be made inside the hosts, or across"
        some = make_together(group, [works.ranks[rank] for rank in ranks], backend, name, what)
        works.beside.append(RankGroup.of(some).works)
        return some

    if works.met is None:
        met = works.met = Met.by(group.all_gather_json)
        works.why_no_memory = met.why_not or met.why_one_level or None
        if not group.transport(torch.device("cpu")).shares_host_memory:
            works.why_no_memory = "the process group has another backend than gloo"
        adjoin = [rank for here in met.hosts for rank in here] == [*range(group.size)]
        if others and adjoin and len(met.hosts) > 1 and not met.why_one_level:
            (host, number), backend = divmod(group.rank, len(met.hosts[0])), backend_for(others, ())
            inside = connect(met.hosts[host], f"{met.name}:inside {host}", backend)
            across = connect([here[number] for here in met.hosts], f"{met.name}:across {number}", backend)
            works.levels = Levels(RankGroup.of(inside), RankGroup.of(across), StreamBeside())
    if works.why_no_memory is None and works.memory is None and works.log.shares_memory:
        works.memory, works.why_no_memory = open_shared_memory(
            group.rank, works.met.hosts, works.limit, group.all_gather_json, connect
        )
        if works.memory is None:
            logger.debug("ranks %s send through sockets: %s", ranks_text(works.ranks), works.why_no_memory)


def make_together(
    group: RankGroup, ranks: Sequence[int], backend: str, name: str, what: str
) -> dist.ProcessGroup:
    """Make a process group of some global ranks, as `make_group`; all ranks of ``group`` call.

    RemoteRankError on every rank if one could not; it begins with ``what`` and has the first reason.
    """
    patience, _ = group.phase.limits(group.works.limit)
    made: dist.ProcessGroup | None = None
    failure: list[object] | None = None
    try:
        # Half of it, as a rank that has failed waits for the others to tell them why.
        patience = patience / 2 if backend == ON_HOST else math.inf
        made = make_group(ranks, backend, name, timeout_of(group.process_group), patience)
    except Exception as error:  # noqa: BLE001 - told below
        failure = [any(late_or_closed(str(error))), message_of(error)]
    everyone = zip(group.numbers, group.all_gather_json(failure), strict=True)
    failed = sorted((*said, rank) for rank, said in everyone if said is not None)
    if made is not None and not failed:
        return made
    heard, reason, rank = failed[0]
    late = " where it waited for a rank that has ended, or did not come" if heard else ""
    raise RemoteRankError(f"{what}: it failed on rank {rank}{late} ({reason})")
