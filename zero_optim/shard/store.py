"""Where ranks keep parameters of which they hold rows; makes a plan's buckets. No communication."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.flow.schedule import ZERO3
from zero_optim.plan.layout import Layout
from zero_optim.plan.plan import Plan
from zero_optim.plan.slices import Slices
from zero_optim.shard.bucket import Bucket, Members, Values
from zero_optim.shard.rows.row_storage import RowStorage
from zero_optim.shard.rows.row_values import RowValues
from zero_optim.shard.whole_values import shared_params, whole_values


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """The parameters of which ranks keep rows, with their units' numbers, and where rows are stored."""

    params: dict[Tensor, int] = field(default_factory=dict)
    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # if owners keep another one
    rows: RowStorage = field(default_factory=RowStorage)


class BucketMaker:
    """Makes the buckets of successive plans."""

    def __init__(self, as_views: bool, store: Store) -> None:
        self.store = store
        self.row_buckets: dict[Tensor, Bucket[RowValues]] = {}  # of all plans, by first parameter
        self._as_views = as_views

    def _members(self, group: RankGroup, params: list[Tensor], layout: Layout, label: str = "") -> Members:
        """Return the members of a bucket; pads a layout whose rows are gathered as equal slices."""
        rows, slices = {row.owner: row.stop - row.start for row in layout.rows if row.stop > row.start}, None
        if group.transport(params[0].device).sends_slices(len(rows)):
            slices = Slices(group.rank, tuple(rows.get(rank, 0) for rank in range(group.size)))
            layout = replace(layout, padding=slices.slice * group.size - slices.total)
        dtype = self.store.compute_dtypes.get(params[0])
        return Members(params, layout, group.rank, label, slices=slices, dtype=dtype)

    def make_rows(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, former: Iterable[Bucket[RowValues]] = ()
    ) -> list[Bucket[RowValues]]:
        """Make a plan's buckets of rows, empty; former ones with an equal plan are reused."""
        rows, there = list[Bucket[RowValues]](), {bucket.params[0]: bucket for bucket in former}
        for planned in plan.buckets:
            chosen = [params[index] for index in planned.params]
            if chosen[0] not in self.store.params:
                continue
            bucket, members = there.get(chosen[0]), self._members(group, chosen, planned.layout)
            ids = list(map(id, chosen))
            if bucket is None or bucket.layout != members.layout or list(map(id, bucket.params)) != ids:
                bucket = Bucket(members, RowValues(members, self.store.rows), ZERO3)
            rows.append(bucket)
        self.row_buckets.update((bucket.params[0], bucket) for bucket in rows)
        return rows

    def make(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, labels: Sequence[str]
    ) -> list[Bucket[Values]]:
        """Make all buckets of a plan, but for those that `make_rows` has made of it."""
        rows = {row.params[0]: row for row in self.make_rows(group, params, plan, self.row_buckets.values())}
        indices = [index for bucket in plan.buckets for index in bucket.params]
        shared = shared_params(p for p in map(params.__getitem__, indices) if p not in self.store.params)
        buckets: list[Bucket[Values]] = []
        for planned, label in zip(plan.buckets, labels, strict=True):
            chosen = [params[index] for index in planned.params]
            if (kept := rows.get(chosen[0])) is not None:
                kept.members.relabel(label)
                buckets.append(kept)
            else:
                members = self._members(group, chosen, planned.layout, label)
                values = whole_values(members, as_views=self._as_views, shared=shared)
                buckets.append(Bucket(members, values))
        return buckets
