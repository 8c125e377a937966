"""Makes a plan's buckets. No communication."""

from collections.abc import Iterable, Mapping, Sequence
from operator import is_

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.layout import Layout
from zero_optim.plan.plan import Plan
from zero_optim.shard.rooms import layouts_with_rooms
from zero_optim.shard.storage import Bucket, ParamBucket
from zero_optim.shard.unit_forms import UnitForms
from zero_optim.shard.units import UnitBucket


class BucketMaker:
    """Makes the buckets of successive plans, with header space for stamps."""

    def __init__(self, as_views: bool, units: Mapping[Tensor, int], forms: UnitForms) -> None:
        self.units = units
        self.forms = forms
        self._as_views = as_views
        self._heard: set[int] = set()  # ranks with room for a stamp in a bucket that trains
        self._made_before: dict[Tensor, UnitBucket] = {}  # by their first parameter
        self._layouts_before: list[Layout] = []  # of the buckets to be made next

    def make(
        self, group: RankGroup, params: Sequence[Tensor], plan: Plan, labels: Sequence[str]
    ) -> list[ParamBucket]:
        """Make a plan's buckets, except those that `make_units` made."""
        layouts, self._layouts_before = self._layouts_before or self._layouts(group, params, plan), []
        made: list[ParamBucket] = []
        for bucket, layout, label in zip(plan.buckets, layouts, labels, strict=True):
            members = [params[index] for index in bucket.params]
            if members[0] not in self.units:
                made.append(Bucket(members, layout, group.rank, label, as_views=self._as_views))
            elif members[0] in self._made_before:
                made.append(self._made_before.pop(members[0]))
                made[-1].label = label
            else:
                made.append(UnitBucket(members, layout, group.rank, label, self.forms))
        return made

    def make_units(
        self,
        group: RankGroup,
        params: Sequence[Tensor],
        plan: Plan,
        former: Iterable[UnitBucket] = (),
    ) -> list[UnitBucket]:
        """Make a plan's unit buckets; former ones with an equal plan are reused."""
        made = []
        there = {bucket.params[0]: bucket for bucket in former}
        self._layouts_before = self._layouts(group, params, plan)
        for bucket, layout in zip(plan.buckets, self._layouts_before, strict=True):
            members = [params[index] for index in bucket.params]
            if members[0] not in self.units:
                continue
            found = there.get(members[0])
            if found is None or not _is_as_planned(found, members, layout):
                found = UnitBucket(members, layout, group.rank, "", self.forms)
            made.append(found)
        self._made_before = {bucket.params[0]: bucket for bucket in made}
        return made

    def _layouts(self, group: RankGroup, params: Sequence[Tensor], plan: Plan) -> list[Layout]:
        known = self.units, self.forms.compute_dtypes, self._heard
        return layouts_with_rooms(plan, params, group.size, *known)


def _is_as_planned(bucket: UnitBucket, members: Sequence[Tensor], layout: Layout) -> bool:
    has_members = len(bucket.params) == len(members) and all(map(is_, bucket.params, members))
    return has_members and bucket.layout == layout
