"""`reduce_to_owners`: reduction of gradients to their owners alone, in half the bytes of an all-reduce.

ZeRO stage 2. Owners add in the order of ranks, so sums are reproducible. In our DDP's buckets, from
`OwnerGradients.members`, a rank's part is summed in place; in another DDP's it is packed, and copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from weakref import WeakMethod

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import LET_GO, RankGroup
from zero_optim.comm.lanes import Lease, lanes_for_rows
from zero_optim.comm.row_sum import RowExchange, RowSum
from zero_optim.compat import engine
from zero_optim.compat.streams import HostCopy, StreamBeside, future_on, record_use, to_device
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Then
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.grad_bucket import (
    BucketOwnership,
    GradBucket,
    Hook,
    TensorFuture,
    gradients_in,
    real_buffer,
    views_of,
)
from zero_optim.iteration.joins import NO_JOIN
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.plan.groups import param_names
from zero_optim.plan.pieces import piece_of
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned

_NUM_UNDER_WAY = 2  # one is summed while the next is sent
_NO_OWNER = (
    "a parameter of shape {shape} of the wrapper is not in the optimizer, so it has no owner to reduce its "
    "gradient to: add it to the optimizer, or freeze it before wrapping"
)


class OwnerReduction:
    """The pending reduction of one bucket to owners, divided in place; all ranks construct it."""

    def __init__(
        self,
        group: RankGroup,
        lanes: Sequence[RankGroup],
        bucket: GradBucket,
        ownership: BucketOwnership,
        *,
        all_used: bool,
    ) -> None:
        self._group = group
        self._ownership = ownership
        self._buffer, self._views = bucket.buffer(), views_of(bucket)
        self._flat = real_buffer(bucket, "reduction to owners").div_(group.size)
        sent = [self._packed(rank) for rank in range(group.size)]
        self._total = RowSum(group, lanes, sent, in_place=True)  # nobody else reads the own part
        self._flags_sent = None if all_used else RowExchange(group, lanes, self._flags())
        self._used: list[Tensor] | None = None

    def _packed(self, rank: int) -> Tensor:
        parts = [self._flat[start:stop] for start, stop in self._ownership.spans[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._flat[:0]

    def _flags(self) -> list[Tensor]:
        params, slots = self._ownership.params, self._ownership.slots
        used = [params[slot].grad is not None for of_rank in slots for slot in of_rank]
        flags = to_device(torch.tensor(used, dtype=torch.uint8, device="cpu"), self._flat.device)
        return list(torch.split(flags, [len(of_rank) for of_rank in slots]))

    def wait(self) -> Tensor:
        """Wait for the sum; return the bucket's buffer, reduced only where this rank owns it."""
        total = self._total.wait()
        self._used = None if self._flags_sent is None else self._flags_sent.wait()
        start = 0
        for begin, end in self._ownership.spans[self._group.rank]:
            place, part = self._flat[begin:end], total[start : start + end - begin]
            if place.data_ptr() != part.data_ptr():  # not summed in place
                place.copy_(part)
            start += end - begin
        record_use(self._flat)  # made on the stream of the hook
        return self._buffer

    def gradients(self) -> list[Tensor | None]:
        """After `wait`, return the gradients that this rank owns and any rank used; the CPU may wait."""
        views = gradients_in(self._buffer, self._ownership.params) if self._views is None else self._views
        slots = self._ownership.slots[self._group.rank]
        counts = [1] * len(slots)
        if self._used is not None:
            counts = self._group.read(HostCopy(torch.stack(self._used).sum(0))).tolist()
        gradients: list[Tensor | None] = [None] * len(views)
        for slot, count in zip(slots, counts, strict=True):
            gradients[slot] = views[slot] if count else None
        return gradients


@dataclass(eq=False)
class OwnerGradients:
    """Starts a hook's reductions to owners, and replaces ``param.grad`` where this rank lacks elements."""

    optimizer: ZeroRedundancyOptimizer
    lanes: Lease
    no_owner: str  # the error for parameters without an owner, their {number} and the first {shape}
    agree: Agree | None = None  # Note [Infinities in sharded gradients] in `zero_optim.step.partial`

    def __post_init__(self) -> None:
        self.has_one_owner = False
        self.reduced: list[tuple[Sequence[Tensor], Tensor]] = []  # parameters and buffer of each bucket
        self._known: dict[int, BucketOwnership] = {}  # by number of DDP's bucket
        self._names: dict[Tensor, str] = {}
        self._elsewhere: dict[Tensor, PartialGradient] = {}  # of parameters that this rank has no rows of
        self._num_buckets = 0  # of the optimizer, when owners were looked at

    def begin(self) -> None:
        """Begin a pass; RuntimeError, on every rank, in ``Join``, or if gradients of the last are left."""
        core, self.reduced = self.optimizer.core, []
        if self.optimizer.iteration.joins.under_way:
            raise RuntimeError(f"hooks that reduce gradients to owners take no part in Join: {NO_JOIN}")
        if self._num_buckets != len(core.engine.buckets):
            self._num_buckets, self._elsewhere = len(core.engine.buckets), {}
            self._names = dict(zip(core.params, param_names(core.groups), strict=True))
            owners = {piece.owner for pieces in core.piece_list() for piece in pieces}
            self.has_one_owner = core.ranks.size > 1 and len(owners) == 1
        known = (param for each in self._known.values() for param in each.params)
        left = next((param for param in known if isinstance(param.grad, PartialGradient)), None)
        if left is not None:
            raise RuntimeError(
                f"the gradient of {self._names[left]} has been reduced to its owners: a second backward "
                "pass cannot add to it. Call zero_grad() after each step, and put all but the last backward "
                "pass of a step under no_sync()"
            )

    def start(self, group: RankGroup, bucket: GradBucket, *, all_used: bool) -> OwnerReduction:
        """Start a bucket's reduction; all ranks call, in bucket order."""
        ownership = self.ownership(bucket)
        lanes = self.lanes.groups
        reduction = OwnerReduction(group, lanes, bucket, ownership, all_used=all_used)
        self.reduced.append((ownership.params, bucket.buffer()))
        return reduction

    def ownership(self, bucket: GradBucket) -> BucketOwnership:
        """Return a bucket's ownership; cached until DDP rebuilds its buckets."""
        number, params = bucket.index(), bucket.parameters()
        known = self._known.get(number)
        if known is None or len(known.params) != len(params) or not all(map(is_, known.params, params)):
            pieces = self.optimizer.pieces()
            lacking = [param for param in params if param not in pieces]
            if lacking:
                shape = tuple(lacking[0].shape)
                raise ValueError(self.no_owner.format(number=len(lacking), shape=shape))
            size = self.optimizer.ranks.size
            known = self._known[number] = BucketOwnership.of(params, [pieces[p] for p in params], size)
        return known

    def set_partial(self) -> None:
        """Replace gradients of other owners by partial ones, after DDP has assigned the whole ones."""
        pieces, rank = self.optimizer.pieces(), self.optimizer.ranks.rank
        reduced, self.reduced = self.reduced, []
        for param, buffer in ((param, buffer) for params, buffer in reduced for param in params):
            grad, of_param = param.grad, pieces[param]
            if grad is None or isinstance(grad, PartialGradient):
                continue
            piece = piece_of(of_param, rank)
            if piece is not None and len(of_param) == 1:
                owned(grad, self.agree)
                continue
            rows = None if piece is None else rows_of(grad, piece)
            if rows is not None and rows.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                rows = rows.clone()  # a view would keep the whole gradient; DDP keeps its bucket in any case
            param.grad = self._partial(param, rows)

    def _partial(self, param: Tensor, rows: Tensor | None) -> PartialGradient:
        if rows is None and param in self._elsewhere:
            return self._elsewhere[param]
        pieces = self.optimizer.pieces()[param]
        gradient = PartialGradient(param, pieces, rows, self._names[param], agree=self.agree)
        if rows is None:
            self._elsewhere[param] = gradient
        return gradient

    def version(self) -> int:
        """Return a number that changes when the optimizer gets more parameters."""
        return len(self.optimizer.core.engine.buckets)

    def members(self) -> list[list[Tensor]] | None:
        """Return each bucket's parameters in the order of owners; None if one rank owns all."""
        pieces = self.optimizer.pieces()
        if len({piece.owner for of_param in pieces.values() for piece in of_param}) == 1:
            return None

        def owners(param: Tensor) -> tuple[int, int]:
            return pieces[param][0].owner, pieces[param][-1].owner

        return [
            sorted(filter(pieces.__contains__, members), key=owners)
            for members in self.optimizer.core.bucket_members()
        ]


def reduce_to_owners(optimizer: ZeroRedundancyOptimizer) -> Hook:
    """Return a comm hook that reduces each gradient to its owner alone, in half the bytes of an all-reduce.

    Use ``ddp.register_comm_hook(None, reduce_to_owners(optimizer))``, on PyTorch's DDP or ours. All ranks
    call it before the first backward pass; it may create process groups. The optimizer owns every parameter
    of the wrapper; gradients are dense. After ``backward()`` the owner has the mean in ``param.grad``; other
    ranks have a `PartialGradient`, without memory, which raises if read. Our DDP takes the optimizer's
    buckets and ``bucket_cap_mb``. DDP's buckets stay as large as all gradients; to save memory use
    `zero_optim.ddp.ShardedDataParallel`.

    Gradients are divided by the number of ranks and added in their order, bf16 and fp16 in float32 with one
    rounding; two ranks get the bits of DDP without a hook. To accumulate, use ``no_sync()`` for all but the
    last backward pass of a step; after a reduced pass call ``zero_grad()``, or the next pass raises. If one
    rank owns every parameter, the hook is an all-reduce. A pass inside ``Join`` raises.

    Raises:
        TypeError: on every rank, if ``optimizer`` is not sharded by this library.
        RuntimeError: on every rank, if it has ``overlap_with_ddp=True``.
        RankMismatchError: on every rank, if not all ranks call this.
    """
    require_ours(optimizer)
    overlaps = optimizer.core.inputs.options.overlap_with_ddp
    agree(optimizer.ranks, [f"overlap_with_ddp={overlaps}"], "the optimizer of reduce_to_owners")
    if overlaps:
        raise RuntimeError(
            "the optimizer has overlap_with_ddp=True, and waits for a hook that steps it: leave that out, or "
            'use zero_step(optimizer, gradients="owners")'
        )
    return ReduceToOwners(optimizer)


class ReduceToOwners:
    """The hook: it reduces buckets, and sets partial gradients at the end of the backward pass."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.__name__ = self.__qualname__ = "reduce_to_owners"  # which DDP logs
        self._optimizer = optimizer
        self._ranks = optimizer.ranks
        lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        agree_on_infinity: Agree = WeakMethod(optimizer.iteration.agree_on_infinity)
        self.buckets = self._gradients = OwnerGradients(optimizer, lanes, _NO_OWNER, agree_on_infinity)
        self._under_way = Flow(_NUM_UNDER_WAY, streams=StreamBeside())
        self._ending: set[int] = set()  # numbers of the engine's passes that will call `_end`

    def __deepcopy__(self, memo: object) -> "ReduceToOwners":
        """Return the hook itself, like a function: a copied DDP has the hook of the original."""
        return self

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's reduction, and wait for an earlier one."""
        # Our DDP also calls outside a backward pass, to end one that broke off; it raises afterwards.
        group = self._ranks
        is_known = engine.in_backward() and engine.backward_number() in self._ending
        if bucket.index() == 0 and not is_known:  # else Note [Numbers of a static graph] in `stepper`
            if self._optimizer.ranks is not group:
                raise RuntimeError(LET_GO)
            self._under_way.wait()  # for what a pass that broke off has left
            self._ending = set()
            self._gradients.begin()
        if engine.in_backward() and not is_known:
            self._ending.add(engine.backward_number())
            engine.after_backward(lambda: engine.after_backward(self._end))  # behind the callback of DDP
        self._gradients.ownership(bucket)  # raises for parameters without an owner
        if self._gradients.has_one_owner:
            group.during("reduce").count_sum(bucket.buffer())
            return mean_hook(group.process_group, bucket)
        done: TensorFuture = future_on(bucket.buffer().device)

        def begin() -> Then:  # DDP itself finds out which parameters no rank used
            reduction = self._gradients.start(group, bucket, all_used=True)
            return Then([reduction], lambda results: done.set_result(results[0]))

        is_end = bucket.is_last() or engine.has_computed_all()  # perhaps no later hook comes, and DDP waits
        try:
            with torch.no_grad():
                self._under_way.start(begin, device=bucket.buffer().device)
                if is_end:
                    self._under_way.wait()
        except BaseException:
            self._gradients.lanes.abandon()
            raise
        return done

    def _end(self) -> None:
        """Set partial gradients after DDP has assigned its own, at the end of the outermost pass."""
        if not engine.in_outer_backward():
            self._gradients.set_partial()
