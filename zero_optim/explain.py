"""What an optimizer holds on each rank: as data, and as a table. ``optimizer.explain()`` makes it.

Only `holdings` communicates.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.cuts import MIN_ROW_NBYTES, TOLERANCE
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.pieces import numel_of, piece_of
from zero_optim.probe.traits import Traits
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.storage import ParamBucket
from zero_optim.step.local import LocalOptimizer

_MIB = 2**20
_NO_PLACE = "it has no rows that could be shared out evenly"
_MOST_SHOWN = 20  # lines about cuts in the table


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds.

    Args:
        rank: group rank.
        num_params: number of parameters of which it owns all rows, or some.
        numel: the elements it owns of them.
        param_nbytes: the bytes of these.
        state_nbytes: bytes of optimizer state, measured on its storages.
        cost: what owning them costs, in the unit of the cost function.
        mirror_sent_nbytes: what it sends to its buddy at each step, with ``mirror=True``: the bytes of the
            tensors. Before the first step it is what is planned, where the class is known to make state.
        mirror_held_nbytes: CPU memory that it takes for mirrors: two copies of what it owns, and two of what
            the rank before it owns.
    """

    rank: int
    num_params: int
    numel: int
    param_nbytes: int
    state_nbytes: int
    cost: float
    mirror_sent_nbytes: int = 0
    mirror_held_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class BucketHolding:
    """One bucket.

    Args:
        dtype: of its parameters.
        device: where it lies.
        num_params: number of parameters in it.
        nbytes: bytes that a gather sends, including padding.
        owners: ranks that broadcast a row of it.
        balance: bytes of the fullest row, divided by the mean over all ranks; 1 is even.
        active: whether steps gather it. They leave out a bucket if all its parameters have always been
            frozen.
        heard: ranks that broadcast a stamp alone behind the rows, as no row has room for theirs: Note [Every
            rank is heard] in `zero_optim.shard.rooms`.
    """

    dtype: str
    device: str
    num_params: int
    nbytes: int
    owners: tuple[int, ...]
    active: bool
    balance: float
    heard: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What all ranks hold. ``str()`` gives a table.

    Args:
        ranks: what each rank holds, by rank.
        buckets: in the order in which they are gathered.
        traits: a line for each optimizer class, with what trials of the class found.
        cuts: a line for each parameter that is cut, and for each uneven bucket why its parameters are not.
    """

    ranks: tuple[RankHolding, ...]
    buckets: tuple[BucketHolding, ...]
    traits: tuple[str, ...]
    cuts: tuple[str, ...]

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
        broadcasts = f"{self.collectives_per_step} broadcasts a step"
        lines.append(f"balance: fullest rank / mean = {self.balance:.3f}; {broadcasts}")
        lines += [
            f"mirror: rank {r.rank} sends {r.mirror_sent_nbytes / _MIB:.2f} MiB a step to "
            f"rank {(r.rank + 1) % len(self.ranks)}, and keeps {r.mirror_held_nbytes / _MIB:.2f} MiB"
            for r in self.ranks
            if r.mirror_held_nbytes
        ]
        for b in self.buckets:
            where = f"{b.num_params} {b.dtype} on {b.device}, {b.nbytes / _MIB:.2f} MiB"
            heard = f", stamps alone of {list(b.heard)}" if b.heard else ""
            lines.append(f"bucket: {where}, owners {list(b.owners)}{heard}{'' if b.active else ', frozen'}")
        shown = [*self.cuts[:_MOST_SHOWN]]
        if len(self.cuts) > _MOST_SHOWN:
            shown.append(f"and {len(self.cuts) - _MOST_SHOWN} more lines in `cuts`")
        return "\n".join([*lines, *shown, *self.traits])


def explain(
    group: RankGroup,
    sharding: Sharding,
    local: LocalOptimizer,
    groups: Sequence[ParamGroup],
    whole_because: Mapping[Tensor, str],
    state_nbytes: int,
    mirror_nbytes: int = 0,
) -> Explanation:
    """Find out what all ranks hold; all ranks call; two small collectives.

    Args:
        group: the ranks.
        sharding: who owns what.
        local: what steps this rank's parameters.
        groups: the public groups.
        whole_because: why parameters cannot be cut, of those that cannot.
        state_nbytes: the state that this rank holds, in bytes.
        mirror_nbytes: of what it owns, if that is mirrored.
    """
    ranks = holdings(group, sharding, state_nbytes, mirror_nbytes)
    active = [moves or local.moves_frozen for moves in sharding.active()]
    buckets = bucket_holdings(sharding.buckets, active, group.size)
    cuts = [*describe_cuts(sharding, groups), *describe_uneven(sharding, whole_because, buckets)]
    return Explanation(ranks, buckets, tuple(map(describe_traits, local.traits())), tuple(cuts))


def holdings(
    group: RankGroup, sharding: Sharding, state_nbytes: int, mirror_nbytes: int = 0
) -> tuple[RankHolding, ...]:
    """Exchange what each rank holds. All ranks call; two small collectives."""
    owned: list[tuple[int, int]] = []  # elements and their size in bytes
    for param, pieces in sharding.pieces.items():
        piece = piece_of(pieces, group.rank)
        if piece is not None:
            owned.append((numel_of(piece, param.shape), param.element_size()))
    numel, nbytes = sum(numel for numel, _ in owned), sum(numel * size for numel, size in owned)
    cost = sharding.loads[group.rank]
    mine = RankHolding(group.rank, len(owned), numel, nbytes, state_nbytes, cost, mirror_nbytes)
    payloads = group.all_gather_bytes(json.dumps(asdict(mine)).encode())
    told = [RankHolding(**json.loads(payload)) for payload in payloads]
    sent = [each.mirror_sent_nbytes for each in told]  # [-1] is before the first
    return tuple(
        replace(each, mirror_held_nbytes=2 * (sent[rank] + sent[rank - 1])) for rank, each in enumerate(told)
    )


def bucket_holdings(
    buckets: Sequence[ParamBucket], active: Sequence[bool], num_ranks: int
) -> tuple[BucketHolding, ...]:
    """Describe the buckets; does not communicate."""
    described = []
    for bucket, is_gathered in zip(buckets, active, strict=True):
        param, layout = bucket.params[0], bucket.layout
        owners = tuple(row.owner for row in layout.rows if row.stop > row.start)
        nbytes = layout.numel * param.element_size()
        kind = (str(param.dtype).removeprefix("torch."), str(param.device))
        fullest = max((row.stop - row.start for row in layout.rows), default=0)
        balance = fullest * num_ranks / layout.end_of_rows if layout.end_of_rows else 1.0
        heard = tuple(room.owner for room in layout.rooms_behind)
        described.append(
            BucketHolding(*kind, len(bucket.params), nbytes, owners, is_gathered, balance, heard)
        )
    return tuple(described)


def describe_cuts(sharding: Sharding, groups: Sequence[ParamGroup]) -> list[str]:
    """Describe in one line each parameter that is cut; does not communicate."""
    lines = []
    for name, param in zip(param_names(groups), params_of(groups), strict=True):
        pieces = sharding.pieces[param]
        if len(pieces) > 1:
            owners = [piece.owner for piece in pieces]
            lines.append(f"cut: {name} in {len(pieces)} pieces, owners {owners}")
    return lines


def describe_uneven(
    sharding: Sharding,
    whole_because: Mapping[Tensor, str],
    buckets: Sequence[BucketHolding],
) -> list[str]:
    """Describe in one line each uneven bucket, and why it was not cut; does not communicate."""
    num_ranks, lines = len(sharding.loads), []
    for bucket, holding in zip(sharding.buckets, buckets, strict=True):
        above = (holding.balance - 1) * holding.nbytes / num_ranks
        if not holding.active or above <= max(MIN_ROW_NBYTES, TOLERANCE * holding.nbytes / num_ranks):
            continue
        reasons = dict.fromkeys(whole_because[param] for param in bucket.params if param in whole_because)
        why = "; ".join(reasons) or _NO_PLACE
        lines.append(
            f"not cut: {holding.num_params} {holding.dtype} on {holding.device}, {holding.nbytes / _MIB:.2f} "
            f"MiB; the fullest rank sends {holding.balance:.1f} x the mean ({why})"
        )
    return lines


def describe_traits(found: tuple[str, Traits | None]) -> str:
    """Describe in one line what trials of a class found."""
    name, traits = found
    if traits is None:
        return f"{name}: not tried (assume_separable=True)"
    answers = {
        "separable": traits.separable,
        "steppable in parts": traits.steppable_in_parts,
        "element-wise": traits.elementwise,
    }
    return f"{name}: " + ", ".join(what if holds else f"not {what}" for what, holds in answers.items())
