"""Reduction of gradients to their owners alone, in half the bytes of an all-reduce.

ZeRO stage 2 (Rajbhandari et al., SC 2020). Owners add in the order of ranks, so sums are reproducible.

Note [Rows in place]
    In our DDP's buckets, made as `NamedBuckets`, a rank's part is contiguous: it is sent and summed in place.
    In another DDP's a rank's parts are packed to be sent, and the sum is copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowExchange, RowSum
from zero_optim.compat.streams import HostCopy, record_use, to_device
from zero_optim.hooks.bucket import GradBucket, real_buffer
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import param_names
from zero_optim.plan.layout import spans_of
from zero_optim.plan.pieces import Pieces, piece_of
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwnership:
    """The elements of a bucket that each rank owns.

    By rank: ranges ``[start, stop)`` of `real_buffer`'s elements, and the places of its parameters.
    """

    params: tuple[Tensor, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Sequence[Tensor], pieces: Sequence[Pieces], size: int) -> "BucketOwnership":
        """Compute the ownership from pieces; adjoining ranges of one owner are merged."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        slots: list[list[int]] = [[] for _ in range(size)]
        start = 0
        for slot, (param, of_param) in enumerate(zip(params, pieces, strict=True)):
            for owner, begin, end in spans_of(of_param, param.numel() * (1 + param.is_complex())):
                stop, mine = start + end - begin, spans[owner]
                if mine and mine[-1][1] == start:
                    mine[-1] = (mine[-1][0], stop)
                else:
                    mine.append((start, stop))
                slots[owner].append(slot)
                start = stop
        return cls(tuple(params), tuple(map(tuple, spans)), tuple(map(tuple, slots)))


class OwnerReduction:
    """The pending reduction of one bucket to owners; all ranks construct it, in bucket order.

    It divides the bucket in place. ``joined``: this rank's inputs ended, its gradients are old. ``all_used``:
    each parameter was used on some rank, so no flags are sent.
    """

    def __init__(
        self,
        group: RankGroup,
        lanes: Sequence[RankGroup],
        bucket: GradBucket,
        ownership: BucketOwnership,
        *,
        joined: bool,
        all_used: bool,
    ) -> None:
        self._group = group
        self._ownership = ownership
        self._buffer = bucket.buffer()
        self._flat = real_buffer(bucket, "reduction to owners").div_(group.size)
        sent = [self._packed(rank) for rank in range(group.size)]
        self._total = RowSum(group, lanes, sent, in_place=True)  # nobody else reads the own part
        self._flags_sent = None if all_used else RowExchange(group, lanes, self._flags(joined))
        self._used: list[Tensor] | None = None

    def _packed(self, rank: int) -> Tensor:
        parts = [self._flat[start:stop] for start, stop in self._ownership.spans[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._flat[:0]

    def _flags(self, joined: bool) -> list[Tensor]:
        """Return, by owner, which of its parameters were used here."""
        params, slots = self._ownership.params, self._ownership.slots
        used = [not joined and params[slot].grad is not None for of_rank in slots for slot in of_rank]
        flags = to_device(torch.tensor(used, dtype=torch.uint8), self._flat.device)
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

    def used(self) -> set[int]:
        """After `wait`, return the places of own parameters that any rank used; the CPU may wait."""
        slots = self._ownership.slots[self._group.rank]
        if self._used is None:
            return set(slots)
        counts = self._group.read(HostCopy(torch.stack(self._used).sum(0))).tolist()
        return {slot for slot, count in zip(slots, counts, strict=True) if count}


class OwnerGradients:
    """Starts a hook's reductions to owners, and replaces ``param.grad`` where this rank lacks elements.

    ``no_owner``: the error for parameters that the optimizer lacks, with their ``{number}`` and the first
    ``{shape}``. ``agree``: see Note [Infinities in sharded gradients] in `zero_optim.step.partial`.
    ``reduced``: parameters and buffer of each bucket of the pass.
    """

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        lanes: Lease,
        no_owner: str,
        agree: Agree | None = None,
    ) -> None:
        self.lanes = lanes
        self.has_one_owner = False
        self.reduced: list[tuple[Sequence[Tensor], Tensor]] = []
        self._optimizer = optimizer
        self._no_owner = no_owner
        self._agree = agree
        self._known: dict[int, BucketOwnership] = {}  # by number of DDP's bucket
        self._names: dict[Tensor, str] = {}
        self._num_buckets = 0  # of the optimizer, when owners were looked at

    def begin(self, *, joined: bool) -> None:
        """Begin a pass; RuntimeError, on every rank, if gradients of the last one are left."""
        core, self.reduced = self._optimizer.core, []
        if self._num_buckets != core.num_buckets:
            self._num_buckets = core.num_buckets
            self._names = dict(zip(core.params, param_names(core.groups), strict=True))
            owners = {piece.owner for pieces in core.piece_list() for piece in pieces}
            self.has_one_owner = core.ranks.size > 1 and len(owners) == 1
        known = () if joined else (param for each in self._known.values() for param in each.params)
        left = next((param for param in known if isinstance(param.grad, PartialGradient)), None)
        if left is not None:
            raise RuntimeError(
                f"the gradient of {self._names[left]} has been reduced to its owners: a second backward "
                "pass cannot add to it. Call zero_grad() after each step, and put all but the last backward "
                "pass of a step under no_sync()"
            )

    def start(self, group: RankGroup, bucket: GradBucket, *, joined: bool, all_used: bool) -> OwnerReduction:
        """Start a bucket's reduction; all ranks call, in bucket order."""
        ownership = self.ownership(bucket)
        lanes = self.lanes.groups
        reduction = OwnerReduction(group, lanes, bucket, ownership, joined=joined, all_used=all_used)
        self.reduced.append((ownership.params, bucket.buffer()))
        return reduction

    def ownership(self, bucket: GradBucket) -> BucketOwnership:
        """Return a bucket's ownership; cached until DDP rebuilds its buckets."""
        number, params = bucket.index(), bucket.parameters()
        known = self._known.get(number)
        if known is None or len(known.params) != len(params) or not all(map(is_, known.params, params)):
            pieces = self._optimizer.pieces()
            lacking = [param for param in params if param not in pieces]
            if lacking:
                shape = tuple(lacking[0].shape)
                raise ValueError(self._no_owner.format(number=len(lacking), shape=shape))
            size = self._optimizer.ranks.size
            known = self._known[number] = BucketOwnership.of(params, [pieces[p] for p in params], size)
        return known

    def set_partial(self) -> None:
        """Replace gradients of other owners by partial ones, after DDP has assigned the whole ones."""
        pieces, rank = self._optimizer.pieces(), self._optimizer.ranks.rank
        reduced, self.reduced = self.reduced, []
        for param, buffer in ((param, buffer) for params, buffer in reduced for param in params):
            grad, of_param = param.grad, pieces[param]
            piece = piece_of(of_param, rank)
            if grad is None or isinstance(grad, PartialGradient):
                continue
            if piece is not None and len(of_param) == 1:
                owned(grad, self._agree)
                continue
            rows = None if piece is None else rows_of(grad, piece)
            if rows is not None and not _is_in(rows, buffer):
                rows = rows.clone()  # a view would keep the whole gradient; DDP keeps its bucket in any case
            param.grad = PartialGradient(param, of_param, rows, self._names[param], agree=self._agree)


def _is_in(view: Tensor, buffer: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


class NamedBuckets:
    """The optimizer's buckets, for a DDP that asks the hook: Note [Rows in place]."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def version(self) -> int:
        """Return a number that changes when the optimizer gets more parameters."""
        return self._optimizer.core.num_buckets

    def members(self) -> list[list[Tensor]] | None:
        """Return each bucket's parameters in the order of owners; None if one rank owns all."""
        pieces = self._optimizer.pieces()
        if len({piece.owner for of_param in pieces.values() for piece in of_param}) == 1:
            return None

        def owners(param: Tensor) -> tuple[int, int]:
            return pieces[param][0].owner, pieces[param][-1].owner

        return [
            sorted(filter(pieces.__contains__, members), key=owners)
            for members in self._optimizer.core.bucket_members()
        ]
