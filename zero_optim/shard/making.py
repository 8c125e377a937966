"""Makes a plan's buckets. No communication."""

from collections.abc import Iterable, Sequence
from operator import is_

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.layout import Layout
from zero_optim.plan.plan import Plan
from zero_optim.shard.rooms import layouts_with_rooms
from zero_optim.shard.storage import Bucket, ParamBucket, RowBucket, RowStore


class BucketMaker:
    """Makes the buckets of successive plans, with header space for stamps."""

    def __init__(self, as_views: bool, store: RowStore) -> None:
        self.store = store
        self._as_views = as_views
        self._heard: set[int] = set()  # ranks with room for a stamp in a bucket that trains
        # Layouts of the next plan, and its buckets of rows by their first parameter.
        self._prepared: tuple[list[Layout], dict[Tensor, RowBucket]] | None = None

    def make(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, labels: Sequence[str]
    ) -> tuple[list[ParamBucket], list[RowBucket]]:
        """Make a plan's buckets, but for those that `make_rows` made; return all, and those of rows."""
        if self._prepared is None:
            self.make_rows(group, params, plan)
        assert self._prepared is not None
        (layouts, rows), self._prepared = self._prepared, None
        made: list[ParamBucket] = []
        for bucket, layout, label in zip(plan.buckets, layouts, labels, strict=True):
            members = [params[index] for index in bucket.params]
            if members[0] in rows:
                made.append(rows[members[0]])
                made[-1].label = label
            else:
                made.append(Bucket(members, layout, group.rank, label, as_views=self._as_views))
        return made, list(rows.values())

    def make_rows(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, former: Iterable[RowBucket] = ()
    ) -> list[RowBucket]:
        """Make a plan's buckets of rows; former ones with an equal plan are reused."""
        there = {bucket.params[0]: bucket for bucket in former}
        rows: dict[Tensor, RowBucket] = {}
        known = self.store.units, self.store.compute_dtypes, self._heard
        layouts = layouts_with_rooms(plan, params, group.size, *known)
        for bucket, layout in zip(plan.buckets, layouts, strict=True):
            members = [params[index] for index in bucket.params]
            if members[0] in self.store.units:
                made = there.get(members[0])
                if made is None or not _is_as_planned(made, members, layout):
                    made = self.store.bucket(members, layout, group.rank)
                rows[members[0]] = made
        self._prepared = layouts, rows
        return list(rows.values())


def _is_as_planned(bucket: RowBucket, members: Sequence[Tensor], layout: Layout) -> bool:
    has_members = len(bucket.params) == len(members) and all(map(is_, bucket.params, members))
    return has_members and bucket.layout == layout
