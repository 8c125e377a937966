"""What an optimizer holds on each rank: as data, and as a table. ``optimizer.explain()`` makes it."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from zero_optim.comm.collectives import RankGroup
from zero_optim.flow.schedule import Moment, Operation, Placement
from zero_optim.plan.cuts import MIN_ROW_NBYTES, TOLERANCE, row_nbytes
from zero_optim.plan.groups import param_names
from zero_optim.plan.slices import stripes_of
from zero_optim.probe.traits import Traits
from zero_optim.state.core import Core
from zero_optim.state.options import KEPT_WHOLE

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds. State is measured on its storages."""

    rank: int  # of the group
    num_params: int  # of which it owns all rows, or some
    numel: int  # of these rows
    param_nbytes: int
    state_nbytes: int
    cost: float  # of these rows, in the unit of the cost function


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What all ranks hold. ``str()`` gives a table, equal on every rank."""

    ranks: tuple[RankHolding, ...]
    buckets: tuple[str, ...]  # a line for each, in the order of gathers
    traits: tuple[str, ...]  # of each optimizer class: what it tolerates, as trials show
    cuts: tuple[str, ...]  # a line for each cut parameter, and for each uneven bucket the reason
    collectives_per_step: int  # that move rows in a step; none in a group of one
    transport: str  # of CPU tensors: "memory", or "sockets" and why, see `share_host_memory`; else ""
    hosts: str = ""  # of several hosts, whether sums and gathers go in two levels, and why not

    @property
    def balance(self) -> float:
        """The highest cost of a rank, divided by the mean; 1 is even."""
        total = sum(rank.cost for rank in self.ranks)
        return max(rank.cost for rank in self.ranks) * len(self.ranks) / total if total else 1.0

    def __str__(self) -> str:
        lines = ["rank  parameters      elements  parameter MiB  state MiB      cost"]
        for r in self.ranks:
            sizes = f"{r.param_nbytes / _MIB:13.2f}  {r.state_nbytes / _MIB:9.2f}  {r.cost:8.3g}"
            lines.append(f"{r.rank:4}  {r.num_params:10}  {r.numel:12,}  {sizes}")
        through = f", through {self.transport}" if self.transport else ""
        collectives = f"{self.collectives_per_step} collectives a step{through}"
        lines.append(f"balance: fullest rank / mean = {self.balance:.3f}; {collectives}")
        more = f"and {len(self.cuts) - 20} more lines in `cuts`" if len(self.cuts) > 20 else ""
        lines += [self.hosts, *self.buckets, *self.cuts[:20], more, *self.traits]
        return "\n".join(filter(None, lines))

    __repr__ = __str__  # for notebooks


def explain(core: Core) -> Explanation:
    """Exchange what all ranks hold; all ranks call; two small collectives."""
    with core.group.doing("explain()"):
        group, works = core.group, core.group.works
        pieces = [(p, piece) for p in core.params if (piece := core.sharding.piece_here(p)) is not None]
        owned = [((piece.stop - piece.start) * math.prod(p.shape[1:]), p.itemsize) for p, piece in pieces]
        numel, nbytes = sum(numel for numel, _ in owned), sum(numel * size for numel, size in owned)
        holding = group.rank, len(owned), numel, nbytes, core.state_nbytes(), core.sharding.loads[group.rank]
        payloads = group.all_gather_bytes(json.dumps(holding).encode())
        cuts = [
            f"cut: {name} in {len(pieces)} pieces, owners {[piece.owner for piece in pieces]}"
            for name, pieces in zip(param_names(core.groups), core.piece_list(), strict=True)
            if len(pieces) > 1
        ]
        buckets, uneven, num_sent = zip(*_buckets(core), strict=True)
        transport = "memory" if group.shared_memory(group.device) is not None else ""
        if not transport and group.size > 1 and group.device.type == "cpu":
            why = works.why_no_memory if works.log.shares_memory else "share_host_memory(False)"
            transport = f"sockets ({why})" if why else ""
        return Explanation(
            ranks=tuple(RankHolding(*json.loads(payload)) for payload in payloads),
            buckets=buckets,
            traits=tuple(_traits_text(*of_class) for of_class in core.owned.local.traits()),
            cuts=(*cuts, *filter(None, uneven)),
            collectives_per_step=sum(num_sent) if group.size > 1 else 0,
            transport=transport,
            hosts=_hosts_text(group),
        )


def summary(core: Core) -> str:
    """Say in one line what this rank holds. No communication."""
    names = " and ".join(dict.fromkeys(name for name, _ in core.owned.local.traits()))
    owned = f"owns {len(core.own_params())} of {len(core.params)} parameters"
    ranks = f"rank {core.ranks.rank} of {core.ranks.size}"
    return f"{names}, {ranks}, {owned}, {core.state_nbytes():,} bytes of state"


def _hosts_text(group: RankGroup) -> str:
    works, device = group.works, (*group.data_devices, group.device)[0]
    if (met := works.met) is None or len(met.hosts) == 1:
        return ""
    if group.shared_memory(device) is not None or group.levels(device) is not None:
        each = f"{len(met.hosts)} hosts of {len(met.hosts[0])} ranks"
        return f"{each}: sums go inside a host, then across, gathers back; what crosses does so once"
    is_gloo = group.transport(device).shares_host_memory
    why = met.why_one_level or (works.why_no_memory if is_gloo else "the ranks of a host do not adjoin")
    return f"sums and gathers go between all ranks at once: {why}"


def _buckets(core: Core) -> Iterator[tuple[str, str, int]]:
    """Yield each bucket's line, why it is uneven or "", and how many collectives gather it in a step."""
    reasons = dict(core.sharding.whole_because)
    for group, given in zip(core.groups, core.owned.local.specs, strict=False):
        reasons |= {} if given.may_cut else dict.fromkeys(group["params"], KEPT_WHOLE)
    listed = list(zip(core.engine.buckets, core.engine.active(), strict=True))
    nbytes_of = {kind: sum(each.nbytes for each, moves in listed if moves == kind) for kind in (True, False)}
    least_row = core.sharding.row_nbytes_on(core.group.data_devices)
    for bucket, moves in listed:
        (param, *_), layout, active = bucket.params, bucket.layout, moves or core.owned.local.moves_frozen
        kind = f"{len(bucket.params)} {str(param.dtype).removeprefix('torch.')}"
        nbytes = layout.numel * param.itemsize
        size = f"{nbytes / _MIB:.2f} MiB"
        why = "; ".join(dict.fromkeys(reasons[each] for each in bucket.params if each in reasons))
        if bucket.schedule.parameters is Placement.HELD:
            sends = Operation.REDUCE in bucket.schedule[Moment.STEP]
            owners = [row.owner for row in layout.rows]
            where = f"whole on owners {owners}" if sends else "where their rows lie"
            yield f"DTensors: {kind}, {size}, stepped {where}" + f" ({why})" * bool(why), "", 2 * sends
            continue
        rows = {row.owner: row.stop - row.start for row in layout.rows if row.stop > row.start}
        worth = row_nbytes(nbytes_of[moves], core.group.size, least_row)  # as `plan.cuts` chooses owners
        mean = layout.numel / max(1, min(core.group.size, -(-nbytes // worth)))
        text, fullest = f"{kind} on {param.device}, {size}, owners {[*rows]}", max(rows.values(), default=0)
        uneven = ""
        if active and fullest - mean > max(MIN_ROW_NBYTES / param.itemsize, TOLERANCE * mean):
            why = why or "it has no rows that could be shared out evenly"
            uneven = f"not cut: {text}; the fullest rank sends {fullest / mean:.1f} x the mean ({why})"
        sent, levels, slices = len(rows), core.group.levels(param.device), bucket.members.slices
        if slices is not None:
            sent = (slices if levels is None else stripes_of(slices, levels.inside.size)).num_collectives
        yield f"bucket: {text}{'' if active else ', frozen'}", uneven, sent * active


def _traits_text(name: str, traits: Traits | None) -> str:
    if traits is None:
        return f"{name}: not tried (assume_separable=True)"
    holds = traits.separable, traits.steppable_in_parts, traits.elementwise
    whole, parts, each = ("" if is_so else "not " for is_so in holds)
    return f"{name}: {whole}separable, {parts}steppable in parts, {each}element-wise"
