"""Where ranks keep parameters of which they hold rows, and the making of a plan's buckets. No communication.

Note [Every rank is heard]
    Each row has space for a stamp, except one within a single parameter. A rank without such a row that
    trains gets space behind one bucket's rows, and broadcasts these 32 bytes beside the owners; on gloo an
    all-gather would take more messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.health.stamp import STAMP_NBYTES
from zero_optim.plan.layout import Layout, with_rooms, with_rooms_behind
from zero_optim.plan.plan import Plan, alignment_of
from zero_optim.shard.bucket import Bucket, shared_params
from zero_optim.shard.row_bucket import RowBucket
from zero_optim.shard.row_storage import HostStorage, RowStorage


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """The parameters of which ranks keep rows, with their units' numbers, and where rows are stored."""

    params: dict[Tensor, int] = field(default_factory=dict)
    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # if owners keep another one
    rows: RowStorage = field(default_factory=RowStorage)

    @property
    def on_host(self) -> HostStorage | None:
        """The storage on the host of an accelerator's model, or None."""
        return self.rows if isinstance(self.rows, HostStorage) else None


class BucketMaker:
    """Makes the buckets of successive plans, with header space for stamps."""

    def __init__(self, as_views: bool, store: Store) -> None:
        self.store = store
        self._as_views = as_views
        self._heard: set[int] = set()  # ranks with room for a stamp in a bucket that trains
        # Layouts of the next plan, and its buckets of rows by their first parameter.
        self._prepared: tuple[list[Layout], dict[Tensor, RowBucket]] | None = None

    def make_rows(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, former: Iterable[RowBucket] = ()
    ) -> list[RowBucket]:
        """Make a plan's buckets of rows, empty; former ones with an equal plan are reused."""
        store, rows = self.store, dict[Tensor, RowBucket]()
        there = {bucket.params[0]: bucket for bucket in former}
        layouts = layouts_with_rooms(
            plan, params, group.size, store.params, store.compute_dtypes, self._heard
        )
        for planned, layout in zip(plan.buckets, layouts, strict=True):
            members = [params[index] for index in planned.params]
            first = members[0]
            if first not in store.params:
                continue
            bucket = there.get(first)
            ids = list(map(id, members))
            if bucket is None or bucket.layout != layout or list(map(id, bucket.params)) != ids:
                dtype = store.compute_dtypes.get(first)
                bucket = RowBucket(members, layout, group.rank, dtype=dtype, storage=store.rows)
            rows[first] = bucket
        self._prepared = layouts, rows
        return list(rows.values())

    def make(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, labels: Sequence[str]
    ) -> list[Bucket]:
        """Make all buckets of a plan, but for those that `make_rows` made."""
        if self._prepared is None:
            self.make_rows(group, params, plan)
        assert self._prepared is not None
        (layouts, rows), self._prepared = self._prepared, None
        indices = [index for bucket in plan.buckets for index in bucket.params]
        shared = shared_params(p for p in map(params.__getitem__, indices) if p not in self.store.params)
        buckets: list[Bucket] = []
        for planned, layout, label in zip(plan.buckets, layouts, labels, strict=True):
            members = [params[index] for index in planned.params]
            bucket: Bucket | None = rows.get(members[0])
            if bucket is None:
                bucket = Bucket(members, layout, group.rank, as_views=self._as_views, shared=shared)
            bucket.label = label
            buckets.append(bucket)
        return buckets


def layouts_with_rooms(
    plan: Plan,
    params: Sequence[Tensor],
    size: int,
    units: Mapping[Tensor, int],
    compute_dtypes: Mapping[Tensor, torch.dtype],  # of parameters that travel in a narrower dtype
    heard: set[int],  # ranks with space in a bucket that is gathered after each step
) -> list[Layout]:
    """Return the plan's layouts with header space; extends the ranks with space in a trained bucket."""
    firsts = [params[bucket.params[0]] for bucket in plan.buckets]
    layouts = [bucket.layout for bucket in plan.buckets]
    if size == 1:
        return layouts
    lengths = [-(-STAMP_NBYTES // compute_dtypes.get(first, first.dtype).itemsize) for first in firsts]
    alignments = list(map(alignment_of, firsts))
    layouts = list(map(with_rooms, layouts, lengths, alignments))
    trained = [
        number for number, first in enumerate(firsts) if first.requires_grad and layouts[number].end_of_rows
    ]
    heard.update(room.owner for number in trained for room in layouts[number].rooms)
    silent = [rank for rank in range(size) if rank not in heard]
    if silent and trained:
        # The bucket gathered first: parameters outside units, in the step, else the outermost unit, which
        # has the lowest number.
        chosen = min(trained, key=lambda number: units.get(firsts[number], -1))
        layout = layouts[chosen]
        layouts[chosen] = with_rooms_behind(layout, silent, lengths[chosen], alignments[chosen])
        heard.update(silent)
    return layouts
