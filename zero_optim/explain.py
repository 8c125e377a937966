"""What an optimizer holds on each rank: as data, and as a table. ``optimizer.explain()`` makes it.

Only `holdings` communicates.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.probe.traits import Traits
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.storage import ParamBucket
from zero_optim.step.local import LocalOptimizer

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds.

    Args:
        rank: group rank.
        num_params: number of parameters owned.
        numel: their elements.
        param_nbytes: their bytes.
        state_nbytes: bytes of optimizer state, measured on its storages.
        cost: what owning them costs, in the unit of the cost function.
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
        dtype: of its parameters.
        device: where it lies.
        num_params: number of parameters in it.
        nbytes: bytes that a gather sends, including padding.
        owners: ranks that broadcast a row of it.
        active: whether steps gather it. They leave out a bucket if all its parameters have always been
            frozen.
    """

    dtype: str
    device: str
    num_params: int
    nbytes: int
    owners: tuple[int, ...]
    active: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """What all ranks hold. ``str()`` gives a table.

    Args:
        ranks: what each rank holds, by rank.
        buckets: in the order in which they are gathered.
        traits: a line for each optimizer class, with what trials of the class found.
    """

    ranks: tuple[RankHolding, ...]
    buckets: tuple[BucketHolding, ...]
    traits: tuple[str, ...]

    @property
    def collectives_per_step(self) -> int:
        """How many broadcasts a step starts; none in a group of one."""
        return sum(len(b.owners) for b in self.buckets if b.active) if len(self.ranks) > 1 else 0

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
        for b in self.buckets:
            where = f"{b.num_params} {b.dtype} on {b.device}, {b.nbytes / _MIB:.2f} MiB"
            lines.append(f"bucket: {where}, owners {list(b.owners)}{'' if b.active else ', frozen'}")
        return "\n".join([*lines, *self.traits])


def explain(
    group: RankGroup, sharding: Sharding, local: LocalOptimizer, owned: Sequence[Tensor], state_nbytes: int
) -> Explanation:
    """Find out what all ranks hold; all ranks call; two small collectives.

    Args:
        group: the ranks.
        sharding: who owns what.
        local: what steps this rank's parameters.
        owned: these parameters.
        state_nbytes: the state that this rank holds, in bytes.
    """
    ranks = holdings(group, owned, state_nbytes, sharding.loads[group.rank])
    active = [moves or local.moves_frozen for moves in sharding.active()]
    buckets = bucket_holdings(sharding.buckets, active)
    return Explanation(ranks, buckets, tuple(map(describe_traits, local.traits())))


def holdings(
    group: RankGroup, owned: Sequence[Tensor], state_nbytes: int, cost: float
) -> tuple[RankHolding, ...]:
    """Exchange what each rank holds. All ranks call; two small collectives."""
    nbytes = sum(param.numel() * param.element_size() for param in owned)
    mine = RankHolding(group.rank, len(owned), sum(p.numel() for p in owned), nbytes, state_nbytes, cost)
    payloads = group.all_gather_bytes(json.dumps(asdict(mine)).encode())
    return tuple(RankHolding(**json.loads(payload)) for payload in payloads)


def bucket_holdings(buckets: Sequence[ParamBucket], active: Sequence[bool]) -> tuple[BucketHolding, ...]:
    """Describe the buckets; does not communicate."""
    described = []
    for bucket, is_gathered in zip(buckets, active, strict=True):
        param, layout = bucket.params[0], bucket.layout
        owners = tuple(row.owner for row in layout.rows if row.stop > row.start)
        nbytes = layout.numel * param.element_size()
        kind = (str(param.dtype).removeprefix("torch."), str(param.device))
        described.append(BucketHolding(*kind, len(bucket.params), nbytes, owners, is_gathered))
    return tuple(described)


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
