"""The registration of a model's units, an attribute of their parameters, which lead the optimizer to it.

The attribute also makes ``pickle`` and ``copy`` of a freed parameter raise.

Note [An optimizer that comes later]
    Before the optimizer is built, one that never steps holds the rows. The real constructor plans owners for
    its own class and reuses buckets whose plan did not change. Other buckets are gathered one by one, in the
    owners' dtype, for each rank to copy its new rows. Old rows stay until all checks pass, so a constructor
    that raises changes nothing; a mesh's replicas agree before any rank does.
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
from zero_optim.plan.plan import Plan, describe_owners, describe_params
from zero_optim.plan.strides import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE
from zero_optim.shard.gathers import start_gather
from zero_optim.shard.unit_forms import UnitForms
from zero_optim.shard.units import UnitBucket, WideBucket

_CLAIM = "_zero_optim_claim"


class UnitsClaim:
    """One model's units: parameters with unit numbers, buckets by unit, and the ranks that hold the rows.

    ``group`` is None before an optimizer holds them, ``everyone`` without a mesh. If ``is_open``, a later
    optimizer may take over; ``taken_over`` is called with it.
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
        """Set this registration as an attribute of the parameters."""
        for param in self.units:
            setattr(param, _CLAIM, self)

    def unmark(self, params: Iterable[Tensor]) -> None:
        """Remove the registration from some parameters."""
        for param in params:
            if getattr(param, _CLAIM, None) is self:
                for name in (_CLAIM, STRIDES_WHEN_WHOLE, DTYPE_AS_KEPT):
                    vars(param).pop(name, None)

    def place(self, buckets: Iterable[UnitBucket], group: RankGroup) -> None:
        """Store the buckets of the units, and the ranks that share them."""
        self.group = group
        for of_unit in self.buckets:
            of_unit.clear()
        for bucket in buckets:
            self.buckets[self.units[bucket.params[0]]].append(bucket)

    # ------------------------------------------------------------------ an optimizer that comes later

    def check(self, params: Sequence[Tensor], group: RankGroup) -> None:
        """Raise if an optimizer with these parameters and ranks cannot take the units over."""
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
        """Copy this rank's rows into new buckets and free the parameters; all ranks call; communicates."""
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
        """Return a context that raises on all ranks of a mesh if one raises."""
        return nullcontext() if self.everyone is None else failing_together(self.everyone)

    def agree(self, groups: Sequence[ParamGroup], about: Sequence[str], plan: Plan) -> None:
        """Check that the replicas of a mesh have equal optimizers; all their ranks call."""
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
        """Move the units to other buckets; return the callback for the new optimizer. All ranks call.

        Parameters that the optimizer lacks become whole for good, which communicates.
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
    """Yield a bucket's values in the owners' dtype, then free it; all ranks enter; communicates."""
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
    """List buckets for reuse by the next optimizer; none if rows must move to other files."""
    if claim is None or not claim.is_open or claim.forms.keeping is not None:
        return []
    return list(chain.from_iterable(claim.buckets))


def first_claim(params: object) -> UnitsClaim | None:
    """Return the first registration in an optimizer's arguments, which may be invalid, or None."""
    return next(filter(None, (getattr(param, _CLAIM, None) for param in _tensors_in(params))), None)


def group_of_claim(params: object) -> dist.ProcessGroup | None:
    """Return the process group of the parameters' fully sharded model, or None."""
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
    """Return the parameters' registration, or None; raises if they belong to several models."""
    found = {id(claim): claim for param in params if (claim := getattr(param, _CLAIM, None)) is not None}
    if len(found) > 1:
        raise ValueError(
            "the parameters are of several fully sharded models: put all modules into one, or give each an "
            "optimizer"
        )
    claims: list[UnitsClaim] = list(found.values())
    return claims[0] if claims else None
