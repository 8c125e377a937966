"""Where ranks keep parameters of which they hold rows; makes a plan's buckets. No communication."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.layout import Layout
from zero_optim.plan.plan import Plan
from zero_optim.plan.slices import Slices
from zero_optim.shard.bucket import Bucket, shared_params
from zero_optim.shard.row_bucket import RowBucket
from zero_optim.shard.row_storage import RowStorage


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
        self.row_buckets: dict[Tensor, RowBucket] = {}  # of all plans, by first parameter
        self._as_views = as_views

    def _sliced(self, group: RankGroup, layout: Layout, device: torch.device) -> tuple[Layout, Slices | None]:
        """Pad a layout whose rows are gathered as equal slices, and return these."""
        rows = {row.owner: row.stop - row.start for row in layout.rows if row.stop > row.start}
        if not group.transport(device).sends_slices(len(rows)):
            return layout, None
        slices = Slices(group.rank, tuple(rows.get(rank, 0) for rank in range(group.size)))
        return replace(layout, padding=slices.slice * group.size - slices.total), slices

    def make_rows(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, former: Iterable[RowBucket] = ()
    ) -> list[RowBucket]:
        """Make a plan's buckets of rows, empty; former ones with an equal plan are reused."""
        store, rows = self.store, list[RowBucket]()
        there = {bucket.params[0]: bucket for bucket in former}
        for planned in plan.buckets:
            members = [params[index] for index in planned.params]
            first = members[0]
            if first not in store.params:
                continue
            bucket = there.get(first)
            layout, slices = self._sliced(group, planned.layout, first.device)
            ids = list(map(id, members))
            if bucket is None or bucket.layout != layout or list(map(id, bucket.params)) != ids:
                dtype = store.compute_dtypes.get(first)
                bucket = RowBucket(
                    members, layout, group.rank, slices=slices, dtype=dtype, storage=store.rows
                )
            rows.append(bucket)
        self.row_buckets.update((bucket.params[0], bucket) for bucket in rows)
        return rows

    def make(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, labels: Sequence[str]
    ) -> list[Bucket]:
        """Make all buckets of a plan, but for those that `make_rows` has made of it."""
        rows = {row.params[0]: row for row in self.make_rows(group, params, plan, self.row_buckets.values())}
        indices = [index for bucket in plan.buckets for index in bucket.params]
        shared = shared_params(p for p in map(params.__getitem__, indices) if p not in self.store.params)
        buckets: list[Bucket] = []
        for planned, label in zip(plan.buckets, labels, strict=True):
            members = [params[index] for index in planned.params]
            if (kept := rows.get(members[0])) is not None:
                kept.relabel(label)
                buckets.append(kept)
                continue
            layout, slices = self._sliced(group, planned.layout, members[0].device)
            buckets.append(
                Bucket(
                    members, layout, group.rank, label, slices=slices, as_views=self._as_views, shared=shared
                )
            )
        return buckets
