"""The registration of a model's units, an attribute of their parameters, which lead the optimizer to it.

Note [An optimizer that comes later]
    Before the optimizer is built, one that never steps holds the rows. The real constructor plans owners for
    its own class and reuses buckets whose plan did not change. Others are gathered one by one, in the owners'
    dtype, for each rank to copy its new rows. Old rows stay until all checks pass on all replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.strides import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import start_gather
from zero_optim.shard.rows.row_values import RowValues, wide_bucket
from zero_optim.shard.store import Store

_NAME = "_zero_optim_claim"  # of the attribute


class Registration:
    """One model's units: where rows are stored, buckets by unit, who holds the rows. Other models: empty."""

    def __init__(self, num_units: int = 0, taken_over: Callable[[Any], None] | None = None) -> None:
        self.store = Store()
        self.buckets: list[list[Bucket[RowValues]]] = [[] for _ in range(num_units)]
        self.group: RankGroup | None = None  # of an optimizer that holds the rows
        self.everyone: RankGroup | None = None  # of a mesh
        self.is_open = False  # a later optimizer may take over
        self._taken_over = taken_over

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a parameter of a fully sharded model cannot be pickled: no rank holds it. Save "
            "model.state_dict(), or use zero_optim.checkpoint.save"
        )

    @property
    def params(self) -> dict[Tensor, int]:
        """The parameters, with the numbers of their units."""
        return self.store.params

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """That of the ranks which hold the rows."""
        return None if self.group is None else self.group.process_group

    @property
    def all_buckets(self) -> list[Bucket[RowValues]]:
        """The buckets of all units."""
        return list(chain.from_iterable(self.buckets))

    def hold(self, store: Store) -> None:
        """Set the parameters, and where their rows are stored."""
        self.store = store

    def open(self, everyone: RankGroup | None, *, stands_in: bool) -> None:
        """Begin to train, on ``everyone`` of a mesh; if an optimizer ``stands_in``, another may take over."""
        self.everyone, self.is_open = everyone, stands_in

    def mark(self) -> None:
        """Set this registration as an attribute of the parameters."""
        for param in self.params:
            setattr(param, _NAME, self)

    def unmark(self, params: Iterable[Tensor]) -> None:
        """Remove the registration from some parameters."""
        for param in params:
            if getattr(param, _NAME, None) is self:
                for name in (_NAME, STRIDES_WHEN_WHOLE, DTYPE_AS_KEPT):
                    vars(param).pop(name, None)

    def place(self, buckets: Iterable[Bucket[RowValues]], group: RankGroup) -> None:
        """Store the buckets of the units, and the ranks that share them."""
        self.group = group
        for of_unit in self.buckets:
            of_unit.clear()
        for bucket in buckets:
            self.buckets[self.params[bucket.params[0]]].append(bucket)

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
        missing = sum(param.requires_grad for param in set(self.params).difference(params))
        if missing:
            raise ValueError(
                f"the optimizer lacks {missing} trainable parameters of the fully sharded model, so they "
                "would not train: give it all of wrapped.parameters(), in groups if need be, or freeze them "
                "(requires_grad=False) before wrapping"
            )
        if any(param.grad is not None for param in self.params):
            raise RuntimeError(
                "there are gradients already, with owners that change now: build the optimizer before the "
                "first backward pass, or call wrapped.zero_grad() first"
            )
        for bucket in self.all_buckets:
            bucket.values.refresh()

    def fill(self, buckets: Sequence[Bucket[RowValues]]) -> None:
        """Copy this rank's rows into new buckets and free the parameters; all ranks call; communicates."""
        assert self.group is not None
        bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        for bucket in self.all_buckets:
            bucket.values.free()
            if bucket_of.get(bucket.params[0]) is not bucket:
                wide = wide_bucket(bucket)
                start_gather((self.group.during("state"),), wide).wait()
                for param, value in wide.values.by_param.items():
                    if param in bucket_of:
                        bucket_of[param].values.row.take_in(param, value)

    def hand_over(
        self, buckets: Sequence[Bucket[RowValues]], group: RankGroup, params: Sequence[Tensor]
    ) -> Callable[[Any], None] | None:
        """Move the units to other buckets; return the new optimizer's callback. All call; communicates."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._make_whole(set(self.params).difference(params), group)
        self.place(buckets, group)
        if not was_open:
            return None
        for bucket in self.all_buckets:
            bucket.values.release()
        return self._taken_over

    def _make_whole(self, params: AbstractSet[Tensor], group: RankGroup) -> None:
        for bucket in self.all_buckets:
            members = [param for param in bucket.params if param in params]
            if members:
                start_gather((group.during("state"),), bucket).wait()
                values = [param.detach().clone() for param in members]
                bucket.values.free()
                for param, value in zip(members, values, strict=True):
                    param.data = value
        self.unmark(params)
        for param in params:
            del self.params[param]


def is_registered(param: Tensor) -> bool:
    """Whether a parameter is one of a fully sharded model."""
    return hasattr(param, _NAME)


def registration_in(params: object) -> Registration:
    """Return the first registration in an optimizer's arguments, which may be invalid, or an empty one."""
    registrations = (getattr(param, _NAME, None) for param in tensors_in(params))
    return next(filter(None, registrations), None) or Registration()


def tensors_in(params: object) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's arguments, which may be invalid."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, dict):
        yield from tensors_in(params.get("params"))
    elif isinstance(params, list | tuple):
        for each in params:
            yield from tensors_in(each)


def registration_of(params: Iterable[Tensor]) -> Registration:
    """Return the parameters' registration, or an empty one; ValueError if they belong to several models."""
    registrations = list(dict.fromkeys(filter(None, (getattr(param, _NAME, None) for param in params))))
    if len(registrations) > 1:
        raise ValueError(
            "the parameters are of several fully sharded models: put all modules into one, or give each an "
            "optimizer"
        )
    return registrations[0] if registrations else Registration()
