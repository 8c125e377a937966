"""What an optimizer holds on each rank: as data, and as a table. ``optimizer.explain()`` makes it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from zero_optim.comm.agreement import check_flags, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.cuts import MIN_ROW_NBYTES, TOLERANCE
from zero_optim.plan.groups import param_names
from zero_optim.plan.pieces import numel_of
from zero_optim.probe.traits import Traits
from zero_optim.shard.bucket import Bucket
from zero_optim.state.core import Core
from zero_optim.state.options import KEPT_WHOLE

_MIB = 2**20
_NO_PLACE = "it has no rows that could be shared out evenly"
_MOST_SHOWN = 20  # lines about cuts in the table


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds.

    Args:
        rank: group rank.
        num_params: number of parameters of which it owns all rows, or some.
        numel, param_nbytes: the elements of these rows, and their bytes.
        state_nbytes: bytes of optimizer state, measured on its storages.
        cost: of these rows, in the unit of the cost function.
    """

    rank: int
    num_params: int
    numel: int
    param_nbytes: int
    state_nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class BucketHolding:
    """One bucket.

    Args:
        dtype, device: of its parameters.
        num_params: number of parameters in it.
        nbytes: bytes that a gather sends, including padding.
        owners: ranks that broadcast a row of it.
        active: whether steps gather it; not if all its parameters have always been frozen.
        balance: bytes of the fullest row, divided by the mean over all ranks; 1 is even.
        heard: ranks that broadcast a stamp alone: Note [Every rank is heard] in `zero_optim.shard.store`.
    """

    dtype: str
    device: str
    num_params: int
    nbytes: int
    owners: tuple[int, ...]
    active: bool
    balance: float
    heard: tuple[int, ...] = ()

    @classmethod
    def of(cls, bucket: Bucket, is_gathered: bool, num_ranks: int) -> "BucketHolding":
        """Describe a bucket."""
        param, layout = bucket.params[0], bucket.layout
        fullest = max((row.stop - row.start for row in layout.rows), default=0)
        return cls(
            dtype=str(param.dtype).removeprefix("torch."),
            device=str(param.device),
            num_params=len(bucket.params),
            nbytes=layout.numel * param.element_size(),
            owners=tuple(row.owner for row in layout.rows if row.stop > row.start),
            active=is_gathered,
            balance=fullest * num_ranks / layout.end_of_rows if layout.end_of_rows else 1.0,
            heard=tuple(room.owner for room in layout.rooms_behind),
        )

    def __str__(self) -> str:
        return f"{self.num_params} {self.dtype} on {self.device}, {self.nbytes / _MIB:.2f} MiB"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What all ranks hold. ``str()`` gives a table.

    Args:
        ranks: by rank.
        buckets: in the order of gathers.
        traits: a line for each optimizer class: what it tolerates, as trials show.
        cuts: a line for each cut parameter, and for each uneven bucket why its parameters are not cut.
        in_memory: whether ranks send through memory, see `share_host_memory`.
        why_sockets: why they send CPU tensors through sockets, if they do.
    """

    ranks: tuple[RankHolding, ...]
    buckets: tuple[BucketHolding, ...]
    traits: tuple[str, ...]
    cuts: tuple[str, ...]
    in_memory: bool = False
    why_sockets: str = ""

    @property
    def collectives_per_step(self) -> int:
        """How many broadcasts a step starts; none in a group of one."""
        sent = sum(len(b.owners) + len(b.heard) for b in self.buckets if b.active)
        return sent if len(self.ranks) > 1 else 0

    @property
    def balance(self) -> float:
        """The highest cost of a rank, divided by the mean; 1 is even."""
        total = sum(rank.cost for rank in self.ranks)
        return max(rank.cost for rank in self.ranks) * len(self.ranks) / total if total else 1.0

    def __str__(self) -> str:
        rows = [("rank", "parameters", "elements", "parameter MiB", "state MiB", "cost")]
        for r in self.ranks:
            sizes = (f"{r.param_nbytes / _MIB:.2f}", f"{r.state_nbytes / _MIB:.2f}", f"{r.cost:.3g}")
            rows.append((str(r.rank), str(r.num_params), f"{r.numel:,}", *sizes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        through = "memory" if self.in_memory else f"sockets ({self.why_sockets})"
        broadcasts = f"{self.collectives_per_step} broadcasts a step"
        if self.in_memory or self.why_sockets:
            broadcasts += f", through {through}"
        lines.append(f"balance: fullest rank / mean = {self.balance:.3f}; {broadcasts}")
        for b in self.buckets:
            heard = f", stamps alone of {list(b.heard)}" if b.heard else ""
            lines.append(f"bucket: {b}, owners {list(b.owners)}{heard}{'' if b.active else ', frozen'}")
        lines += self.cuts[:_MOST_SHOWN]
        if len(self.cuts) > _MOST_SHOWN:
            lines.append(f"and {len(self.cuts) - _MOST_SHOWN} more lines in `cuts`")
        return "\n".join([*lines, *self.traits])


def explain(core: Core, *, quiet: bool) -> Explanation:
    """Exchange what all ranks hold, and print it on rank 0; all ranks call; three small collectives."""
    with core.group.doing("explain()"):
        with failing_together(core.group):
            check_flags(quiet=quiet)
        explanation = _explained(core)
    if core.group.rank == 0 and not quiet:
        print(explanation)  # noqa: T201 - what it is for
    return explanation


def _explained(core: Core) -> Explanation:
    group, sharding, local = core.group, core.sharding, core.owned.local
    ranks = _exchange(group, core)
    active = [moves or local.moves_frozen for moves in sharding.active()]
    buckets = tuple(
        BucketHolding.of(bucket, is_gathered, group.size)
        for bucket, is_gathered in zip(sharding.buckets, active, strict=True)
    )
    traits = tuple(_traits_text(*of_class) for of_class in local.traits())
    cuts = (*_cut_texts(core), *_uneven_texts(core, buckets))
    is_in_memory, why_sockets = group.shared_memory(group.device) is not None, ""
    if not is_in_memory and group.size > 1 and group.device.type == "cpu":
        works = group.works
        why_sockets = works.why_no_memory or "" if works.log.shares_memory else "share_host_memory(False)"
    return Explanation(ranks, buckets, traits, cuts, is_in_memory, why_sockets)


def _exchange(group: RankGroup, core: Core) -> tuple[RankHolding, ...]:
    owned = [
        (numel_of(piece, param.shape), param.element_size())
        for param in core.own_params()
        if (piece := core.sharding.piece_here(param)) is not None
    ]
    numel, nbytes = sum(numel for numel, _ in owned), sum(numel * size for numel, size in owned)
    cost = core.sharding.loads[group.rank]
    mine = RankHolding(group.rank, len(owned), numel, nbytes, core.state_nbytes(), cost)
    payloads = group.all_gather_bytes(json.dumps(asdict(mine)).encode())
    return tuple(RankHolding(**json.loads(payload)) for payload in payloads)


def _cut_texts(core: Core) -> Iterator[str]:
    for name, pieces in zip(param_names(core.groups), core.piece_list(), strict=True):
        if len(pieces) > 1:
            yield f"cut: {name} in {len(pieces)} pieces, owners {[piece.owner for piece in pieces]}"


def _uneven_texts(core: Core, buckets: Sequence[BucketHolding]) -> Iterator[str]:
    sharding, num_ranks = core.sharding, core.group.size
    whole_because = sharding.whole_because | dict.fromkeys(core.inputs.kept_whole, KEPT_WHOLE)
    for bucket, holding in zip(sharding.buckets, buckets, strict=True):
        above = (holding.balance - 1) * holding.nbytes / num_ranks
        if holding.active and above > max(MIN_ROW_NBYTES, TOLERANCE * holding.nbytes / num_ranks):
            reasons = dict.fromkeys(whole_because[param] for param in bucket.params if param in whole_because)
            why = "; ".join(reasons) or _NO_PLACE
            yield f"not cut: {holding}; the fullest rank sends {holding.balance:.1f} x the mean ({why})"


def _traits_text(name: str, traits: Traits | None) -> str:
    if traits is None:
        return f"{name}: not tried (assume_separable=True)"
    answers = {
        "separable": traits.separable,
        "steppable in parts": traits.steppable_in_parts,
        "element-wise": traits.elementwise,
    }
    return f"{name}: " + ", ".join(what if holds else f"not {what}" for what, holds in answers.items())
