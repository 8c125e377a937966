"""Which parameters belong to the units of a model, as the parameters themselves tell.

An optimizer is given parameters, and no model. If they are freed, it has to know who keeps their values. So
each parameter of a unit has an attribute, the `UnitsClaim` of its model. A registry beside the parameters
would do for that, but only an attribute makes ``pickle`` and ``copy`` of a freed parameter raise.

Note [An optimizer that comes later]
    A model may be wrapped before its optimizer is built. Then an optimizer that is never stepped stands in.
    The constructor of the real one finds the claim, plans owners that suit its class, and makes buckets for
    them; a former bucket that is as planned is used again. The others are gathered one by one, in the dtype
    that owners keep; each rank copies the rows that it is to keep, and the bucket is freed. Until everything
    is checked the former rows stay, so a constructor that raises changes nothing. Over a mesh each replica
    moves its own, and all fail together, and agree, before any rank has changed something.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import agree_between_replicas
from zero_optim.plan.groups import ParamGroup, describe_options
from zero_optim.plan.memory import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE
from zero_optim.plan.plan import Plan, describe_owners, describe_params
from zero_optim.shard.gathers import start_gather
from zero_optim.shard.unit_forms import UnitForms
from zero_optim.shard.units import UnitBucket, WideBucket

_CLAIM = "_zero_optim_claim"


class UnitsClaim:
    """The parameters of the units of one model, and who keeps them.

    Args:
        units: the parameters, each with the number of its unit.
        num_units: how many units there are.
        taken_over: called with an optimizer that has taken them over.

    Attributes:
        buckets: those of each unit. These lists stay; what is in them changes with the optimizer.
        forms: how they keep the parameters.
        group: the ranks that keep the rows; None before anybody does.
        everyone: with a mesh, the ranks of all replicas; None without one.
        is_open: an optimizer may come and take them over.
    """

    def __init__(self, units: dict[Tensor, int], num_units: int, taken_over: Callable[[Any], None]) -> None:
        self.units = units
        self.buckets: list[list[UnitBucket]] = [[] for _ in range(num_units)]
        self.forms = UnitForms()
        self.group: RankGroup | None = None
        self.everyone: RankGroup | None = None
        self.is_open = False
        self._taken_over = taken_over

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled with a parameter."""
        raise RuntimeError(
            "a parameter of a fully sharded model cannot be pickled: no rank holds it. Save "
            "model.state_dict(), or use zero_optim.checkpoint.save"
        )

    def mark(self) -> None:
        """Have the parameters tell of this claim."""
        for param in self.units:
            setattr(param, _CLAIM, self)

    def unmark(self, params: Iterable[Tensor]) -> None:
        """Have some parameters tell nothing any more."""
        for param in params:
            if getattr(param, _CLAIM, None) is self:
                for name in (_CLAIM, STRIDES_WHEN_WHOLE, DTYPE_AS_KEPT):
                    vars(param).pop(name, None)

    def place(self, buckets: Iterable[UnitBucket], group: RankGroup) -> None:
        """Take note of the buckets that hold the units from now on, and of the ranks that share them."""
        self.group = group
        for of_unit in self.buckets:
            of_unit.clear()
        for bucket in buckets:
            self.buckets[self.units[bucket.params[0]]].append(bucket)

    # ------------------------------------------------------------------ an optimizer that comes later

    def check(self, params: Sequence[Tensor], group: RankGroup) -> None:
        """Refuse an optimizer with these parameters and ranks that cannot take the units over."""
        if self.group is None:  # nobody keeps them yet
            return
        if not self.is_open:
            raise ValueError(
                "the parameters are those of a fully sharded model that has an optimizer already: step with "
                "that one, or build model, wrapper and optimizer anew"
            )
        if group.process_group is not self.group.process_group:
            raise ValueError(
                "the optimizer has another process group than the fully sharded model: give both the same "
                "process_group"
            )
        given = set(params)
        missing = sum(param.requires_grad for param in self.units if param not in given)
        if missing:
            raise ValueError(
                f"the optimizer lacks {missing} trainable parameters of the fully sharded model, so nobody "
                "would step them: give it all of wrapped.parameters(), in groups if need be, or freeze them "
                "(requires_grad=False) before wrapping"
            )
        if any(param.grad is not None for param in self.units):
            raise RuntimeError(
                "there are gradients already, with owners that change now: build the optimizer before the "
                "first backward pass, or call wrapped.zero_grad() first"
            )
        for of_unit in self.buckets:
            for bucket in of_unit:
                bucket.check_unpinned()
                bucket.refresh()

    def fill(self, buckets: Sequence[UnitBucket]) -> None:
        """Copy the rows that this rank is to keep into buckets that are new; all ranks call; communicates.

        The parameters are freed when it returns, and are still those of the former buckets.
        """
        assert self.group is not None
        bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        for of_unit in self.buckets:
            for bucket in of_unit:
                if bucket_of.get(bucket.params[0]) is bucket:
                    bucket.free()
                    continue
                with _values_as_kept(bucket, self.group.during("state")) as values:
                    for param, value in values.items():
                        if param in bucket_of:
                            bucket_of[param].take_in({param: value})

    def failing_together(self) -> Any:  # noqa: ANN401 - a context
        """Give a context that fails on the ranks of all replicas alike; inside, only replicas communicate."""
        return nullcontext() if self.everyone is None else failing_together(self.everyone)

    def agree(self, groups: Sequence[ParamGroup], about: Sequence[str], plan: Plan) -> None:
        """Check that the replicas of a mesh have equal optimizers; all ranks of it call."""
        if self.everyone is not None:
            described = [*describe_params(groups), *describe_options(groups), *about]
            items = [*described, *describe_owners(groups, plan)]
            agree_between_replicas(self.everyone, items)

    def passed_on(
        self,
        buckets: Sequence[UnitBucket],
        forms: UnitForms,
        group: RankGroup,
        params: Sequence[Tensor],
    ) -> Callable[[Any], None] | None:
        """Have other buckets hold the units, filled by `fill` if somebody held them before; all ranks call.

        Communicates if the optimizer lacks parameters: they become whole, for good.

        Returns:
            What is to be called with the optimizer when it is built.
        """
        was_open = self.is_open
        if was_open:
            self._make_whole(set(self.units).difference(params), group)
            for bucket in buckets:
                bucket.let_go()
                bucket.has_new_place()
        self.is_open, self.forms = False, forms
        self.place(buckets, group)
        return self._taken_over if was_open else None

    def _make_whole(self, params: AbstractSet[Tensor], group: RankGroup) -> None:
        for of_unit in self.buckets:
            for bucket in of_unit:
                kept = [param for param in bucket.params if param in params]
                if kept:
                    start_gather((group.during("state"),), bucket).wait()
                    values = [param.detach().clone() for param in kept]
                    bucket.free()
                    for param, value in zip(kept, values, strict=True):
                        param.data = value
        self.unmark(params)
        for param in params:
            del self.units[param]


@contextmanager
def _values_as_kept(bucket: UnitBucket, group: RankGroup) -> Iterator[Mapping[Tensor, Tensor]]:
    """Give the values of a bucket as its owners keep them, then free it; all ranks enter; communicates."""
    bucket.free()
    if bucket.is_rounded:
        wide = WideBucket(bucket)
        start_gather((group,), wide).wait()
        yield wide.values
        return
    start_gather((group,), bucket).wait()
    try:
        yield {param: param for param in bucket.params}
    finally:
        bucket.free()


def reusable_buckets(claim: UnitsClaim | None) -> list[UnitBucket]:
    """List buckets that the next optimizer may use again; none if rows have to move to other files."""
    if claim is None or not claim.is_open or claim.forms.keeping is not None:
        return []
    return list(chain.from_iterable(claim.buckets))


def first_claim(params: object) -> UnitsClaim | None:
    """Return the claim of the first of an optimizer's parameters that has one; what is wrong is ignored."""
    return next(filter(None, (getattr(param, _CLAIM, None) for param in _tensors_in(params))), None)


def group_of_claim(params: object) -> dist.ProcessGroup | None:
    """Return the process group of the fully sharded model that some parameters belong to, if any."""
    claim = first_claim(params)
    return None if claim is None or claim.group is None else claim.group.process_group


def _tensors_in(params: object) -> Iterator[Tensor]:
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, dict):
        yield from _tensors_in(params.get("params"))
    elif isinstance(params, list | tuple):
        for each in params:
            yield from _tensors_in(each)


def claim_of(params: Iterable[Tensor]) -> UnitsClaim | None:
    """Return the claim of some parameters, if any belongs to a unit; raises if they are of several models."""
    found = {id(claim): claim for param in params if (claim := getattr(param, _CLAIM, None)) is not None}
    if len(found) > 1:
        raise ValueError(
            "the parameters are of several fully sharded models: put all modules into one, or give each an "
            "optimizer"
        )
    claims: list[UnitsClaim] = list(found.values())
    return claims[0] if claims else None
