"""The owners of an optimizer's parameters."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zero_optim.comm.agreement import agreeing, combine_answers, failing_together
from zero_optim.comm.backends import devices_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.costs import Cost
from zero_optim.plan.groups import ParamGroup, bucket_text, describe_options, param_names, params_of
from zero_optim.plan.pieces import Piece, Pieces, piece_of
from zero_optim.plan.plan import (
    Plan,
    describe_costs,
    describe_owners,
    describe_params,
    make_plan,
    make_plan_beside,
)
from zero_optim.plan.strides import check_shardable
from zero_optim.probe.traits import ELSEWHERE
from zero_optim.shard.bucket import Bucket, Values
from zero_optim.shard.order import Alike
from zero_optim.shard.places import is_freed
from zero_optim.shard.rows.row_values import RowValues
from zero_optim.shard.store import BucketMaker, Store

# Advice for a difference in options, by the first word of the differing item.
_HINTS = dict.fromkeys(
    ("optimizer", "group"),
    "If that is meant to differ, do not pass it: give a function as optimizer_class that finds it out when "
    "called, such as `def build(params, **options): return MyClass(params, rank=dist.get_rank(), **options)`",
)


# This rank's reason, for each parameter, why ranks may not own these pieces of it, or None.
WhyWhole = Callable[[Sequence[Pieces]], Sequence[str | None]]


_NO_OWNER = "{} has no owner: add parameters with add_param_group(), on all ranks"


class _PiecesOf(dict[Tensor, Pieces]):
    def __missing__(self, param: Tensor) -> Pieces:
        raise ValueError(_NO_OWNER.format(f"a parameter of shape {tuple(param.shape)}"))


class Sharding:
    """The owners of parameters, by plans on which all ranks agree."""

    def __init__(
        self,
        group: RankGroup,
        as_views: bool,
        cap_mb: float,
        *,
        store: Store,
    ) -> None:
        self.pieces: dict[Tensor, Pieces] = _PiecesOf()
        self.whole_because: dict[Tensor, str] = {}
        self.loads: list[float] = [0] * group.size
        self.cut_params: list[Tensor] = []  # the same on every rank
        self.held: dict[Tensor, Pieces | None] = {}  # parameters of which others keep rows, if cut by rows
        self._num_buckets = 0
        self.group = group
        self.maker = BucketMaker(as_views, store)
        self.cap_nbytes = _nbytes(cap_mb)

    def plan(
        self,
        groups: Sequence[ParamGroup],
        costs: Sequence[Cost],
        before: int,
        about: Sequence[str],
        why_whole: WhyWhole | None,
    ) -> Plan:
        """Return the plan of new groups, equal on all ranks, which all call; `add` applies it. Communicates.

        ``why_whole`` says which cuts are refused; None cuts nothing and balances only the whole model.
        TypeError or ValueError for unshardable parameters, RankMismatchError for unequal arguments.
        """
        new, store = groups[before:], self.maker.store
        reasons: Sequence[str | None] = []
        with agreeing(self.group, "the parameters and options of the optimizer", _HINTS) as agreed:
            check_shardable(groups, set(filter(is_freed, store.params)), self.held)
            by_group = [group["params"] for group in new]
            spent = [[cost(p) for p in params] for params, cost in zip(by_group, costs, strict=True)]
            every = params_of(new)
            numbers = [store.params.get(param) for param in every]
            used = [store.compute_dtypes.get(param, param.dtype) for param in every]
            row_nbytes = self.row_nbytes_on(devices_of(every))

            def planned(may_cut: Sequence[bool] | None) -> Plan:
                known = self.loads, self.cap_nbytes, may_cut, numbers, used
                if self.held.keys().isdisjoint(every):
                    return make_plan(by_group, spent, *known, row_nbytes)
                held = [self.held[p] or () if p in self.held else None for p in every]
                return make_plan_beside(held, by_group, spent, *known[:3], row_nbytes)

            plan = planned(None if why_whole is None else [True] * len(every))
            if why_whole is not None and plan.is_cut:
                reasons = why_whole(plan.pieces)
            alike = Alike.among(new, store.params.keys() | self.held.keys())
            # Owners come last: they differ if anything else does, and only the first difference is reported.
            items = [*describe_params(new), *describe_options(new), *about]
            items.append(f"buckets of {self.cap_nbytes} bytes, rows of {row_nbytes}")
            items += [f"units of the parameters: {numbers}, used as {used}"] if store.params else []
            items += describe_owners(new, plan) + (describe_costs(new, plan) if reasons else [])
            agreed.items, agreed.beside = items, alike.values
        if agreed.differs:
            alike.check_order(self.group, new)
        if why_whole is None:
            return plan
        return self._cut_where_all_agree(plan, planned, reasons, why_whole)

    def row_nbytes_on(self, devices: Iterable[torch.device]) -> int:
        """Return the bytes of a row that is worth a message on each of some devices; 1 for none."""
        return min((self.group.transport(device).row_nbytes for device in devices), default=1)

    def _cut_where_all_agree(
        self,
        plan: Plan,
        planned: Callable[[Sequence[bool]], Plan],
        reasons: Sequence[str | None],
        why_whole: WhyWhole,
    ) -> Plan:
        """Plan again until all ranks accept every cut; all ranks call."""
        whole_because: list[str | None] = [None] * len(plan.pieces)
        while plan.is_cut:
            borne = combine_answers(self.group, [reason is None for reason in reasons])
            refused = [
                None if may else reason or ELSEWHERE for may, reason in zip(borne, reasons, strict=True)
            ]
            if not any(new and not old for new, old in zip(refused, whole_because, strict=True)):
                break
            whole_because = [old or new for old, new in zip(whole_because, refused, strict=True)]
            plan = planned([reason is None for reason in whole_because])
            if plan.is_cut:  # in other pieces
                with failing_together(self.group):
                    reasons = why_whole(plan.pieces)
        return replace(plan, whole_because=tuple(whole_because))

    def release(self) -> None:
        """Release the process group."""
        self.group = self.group.release()

    def owned(self, params: Sequence[Tensor], plan: Plan) -> dict[Tensor, Piece]:
        """Return this rank's pieces, by parameter."""
        mine = (piece_of(pieces, self.group.rank) for pieces in plan.pieces)
        return {param: piece for param, piece in zip(params, mine, strict=True) if piece is not None}

    def piece_here(self, param: Tensor) -> Piece | None:
        """Return this rank's rows of a parameter, or None."""
        return piece_of(self.pieces[param], self.group.rank)

    def hold(self, rows: Mapping[Tensor, Pieces | None]) -> None:
        """Note parameters of which others keep rows, with these rows if they are cut by rows."""
        self.held.update(rows)

    @property
    def row_buckets(self) -> list[Bucket[RowValues]]:
        """The buckets that are freed between steps."""
        return list(self.maker.row_buckets.values())

    def free_units(self) -> None:
        """Free the parameters of units, as their rows may have changed."""
        for bucket in self.row_buckets:
            bucket.values.stepped(changed=True)

    def is_cut(self, param: Tensor) -> bool:
        """Whether several ranks own rows of a parameter."""
        return len(self.pieces[param]) > 1

    def add(self, params: Sequence[Tensor], plan: Plan, names: Sequence[str]) -> list[Bucket[Values]]:
        """Store a plan's owners; return its buckets."""
        self.pieces.update(zip(params, plan.pieces, strict=True))
        refused = zip(params, plan.whole_because, strict=True) if plan.whole_because else ()
        self.whole_because.update((param, reason) for param, reason in refused if reason is not None)
        more = plan.loads(len(self.loads))
        self.loads = [load + extra for load, extra in zip(self.loads, more, strict=True)]
        labels = [
            bucket_text(number, [names[index] for index in bucket.params])
            for number, bucket in enumerate(plan.buckets, self._num_buckets)
        ]
        self._num_buckets += len(plan.buckets)
        buckets = self.maker.make(self.group, params, plan, labels)
        self.cut_params += (param for bucket in buckets for param in bucket.params if self.is_cut(param))
        self.cut_params += (param for param in params if param in self.held and self.is_cut(param))
        return buckets

    def check_owned(self, groups: Sequence[ParamGroup]) -> None:
        """Raise ValueError for a parameter that came without ``add_param_group()``, or is there twice."""
        seen: set[Tensor] = set()
        for param, name in zip(params_of(groups), param_names(groups), strict=True):
            if param not in self.pieces:
                raise ValueError(_NO_OWNER.format(name))
            if param in seen:
                raise ValueError(f"expected each parameter once in the groups, got {name} again")
            seen.add(param)


def _nbytes(cap_mb: float) -> int:
    if type(cap_mb) not in (int, float) or not cap_mb > 0:
        raise ValueError(f"expected bucket_cap_mb to be a number of MiB above 0, got {cap_mb!r}")
    return sys.maxsize if math.isinf(cap_mb) else max(1, int(cap_mb * 2**20))
