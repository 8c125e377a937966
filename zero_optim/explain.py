"""What an optimizer holds on each rank: as data, and as a table. ``optimizer.explain()`` makes it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.cuts import MIN_ROW_NBYTES, TOLERANCE
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.pieces import numel_of, piece_of
from zero_optim.probe.traits import Traits
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.sharding import Sharding
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
        numel: the elements of these rows.
        param_nbytes: their bytes.
        state_nbytes: bytes of optimizer state, measured on its storages.
        cost: of these rows, in the unit of the cost function.
        mirror_sent_nbytes: bytes of the tensors that it sends to its buddy at each step, with
            ``mirror=True``. Before the first step: with the state that trials of the class have shown.
        mirror_held_nbytes: CPU memory of mirrors: two copies of what it owns, and two of what the rank before
            it owns.
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
        active: whether steps gather it; not if all its parameters have always been frozen.
        heard: ranks that broadcast a stamp alone: Note [Every rank is heard] in `zero_optim.shard.rooms`.
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
        ranks: by rank.
        buckets: in the order of gathers.
        traits: a line for each optimizer class: what it tolerates, as trials show.
        cuts: a line for each cut parameter, and for each uneven bucket why its parameters are not cut.
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
    """Exchange what all ranks hold; all ranks call; two small collectives.

    ``whole_because``: why parameters cannot be cut. ``state_nbytes`` and ``mirror_nbytes``: of this rank.
    """
    ranks = _exchange(group, sharding, state_nbytes, mirror_nbytes)
    active = [moves or local.moves_frozen for moves in sharding.active()]
    buckets = tuple(
        _describe_bucket(bucket, is_gathered, group.size)
        for bucket, is_gathered in zip(sharding.buckets, active, strict=True)
    )
    cuts = [*_describe_cuts(sharding, groups), *_describe_uneven(sharding, whole_because, buckets)]
    return Explanation(ranks, buckets, tuple(map(_describe_traits, local.traits())), tuple(cuts))


def _exchange(
    group: RankGroup, sharding: Sharding, state_nbytes: int, mirror_nbytes: int
) -> tuple[RankHolding, ...]:
    owned: list[tuple[int, int]] = []  # elements and their size in bytes
    for param, pieces in sharding.pieces.items():
        piece = piece_of(pieces, group.rank)
        if piece is not None:
            owned.append((numel_of(piece, param.shape), param.element_size()))
    numel, nbytes = sum(numel for numel, _ in owned), sum(numel * size for numel, size in owned)
    cost = sharding.loads[group.rank]
    mine = RankHolding(group.rank, len(owned), numel, nbytes, state_nbytes, cost, mirror_nbytes)
    payloads = group.all_gather_bytes(json.dumps(asdict(mine)).encode())
    ranks = [RankHolding(**json.loads(payload)) for payload in payloads]
    sent = [each.mirror_sent_nbytes for each in ranks]  # [-1] is before the first
    return tuple(
        replace(each, mirror_held_nbytes=2 * (sent[rank] + sent[rank - 1])) for rank, each in enumerate(ranks)
    )


def _describe_bucket(bucket: Bucket, is_gathered: bool, num_ranks: int) -> BucketHolding:
    param, layout = bucket.params[0], bucket.layout
    fullest = max((row.stop - row.start for row in layout.rows), default=0)
    return BucketHolding(
        dtype=str(param.dtype).removeprefix("torch."),
        device=str(param.device),
        num_params=len(bucket.params),
        nbytes=layout.numel * param.element_size(),
        owners=tuple(row.owner for row in layout.rows if row.stop > row.start),
        active=is_gathered,
        balance=fullest * num_ranks / layout.end_of_rows if layout.end_of_rows else 1.0,
        heard=tuple(room.owner for room in layout.rooms_behind),
    )


def _describe_cuts(sharding: Sharding, groups: Sequence[ParamGroup]) -> Iterator[str]:
    for name, param in zip(param_names(groups), params_of(groups), strict=True):
        pieces = sharding.pieces[param]
        if len(pieces) > 1:
            yield f"cut: {name} in {len(pieces)} pieces, owners {[piece.owner for piece in pieces]}"


def _describe_uneven(
    sharding: Sharding, whole_because: Mapping[Tensor, str], buckets: Sequence[BucketHolding]
) -> Iterator[str]:
    num_ranks = len(sharding.loads)
    for bucket, holding in zip(sharding.buckets, buckets, strict=True):
        above = (holding.balance - 1) * holding.nbytes / num_ranks
        if not holding.active or above <= max(MIN_ROW_NBYTES, TOLERANCE * holding.nbytes / num_ranks):
            continue
        reasons = dict.fromkeys(whole_because[param] for param in bucket.params if param in whole_because)
        what = f"{holding.num_params} {holding.dtype} on {holding.device}, {holding.nbytes / _MIB:.2f} MiB"
        why = "; ".join(reasons) or _NO_PLACE
        yield f"not cut: {what}; the fullest rank sends {holding.balance:.1f} x the mean ({why})"


def _describe_traits(of_class: tuple[str, Traits | None]) -> str:
    name, traits = of_class
    if traits is None:
        return f"{name}: not tried (assume_separable=True)"
    answers = {
        "separable": traits.separable,
        "steppable in parts": traits.steppable_in_parts,
        "element-wise": traits.elementwise,
    }
    return f"{name}: " + ", ".join(what if holds else f"not {what}" for what, holds in answers.items())
