"""Reduction of gradients to their owners alone, in half the bytes of an all-reduce.

ZeRO stage 2 (Rajbhandari et al., SC 2020). Owners add in the order of ranks, so sums are reproducible.

Note [Rows in place]
    In our DDP's buckets, made as `NamedBuckets`, a rank's part is contiguous: it is sent and summed in place.
    In another DDP's a rank's parts are packed to be sent, and the sum is copied back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease
from zero_optim.comm.row_sum import RowExchange, RowSum
from zero_optim.compat.streams import HostCopy, record_use, to_device
from zero_optim.hooks.bucket import GradBucket, Hook, real_buffer
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import Pieces


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
            in_row = param.numel() * (1 + param.is_complex()) // max(1, of_param[-1].stop)
            for piece in of_param:
                stop, mine = start + in_row * (piece.stop - piece.start), spans[piece.owner]
                if mine and mine[-1][1] == start:
                    mine[-1] = (mine[-1][0], stop)
                else:
                    mine.append((start, stop))
                slots[piece.owner].append(slot)
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
        joined: bool,
        all_used: bool = False,
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


class BucketsToOwners:
    """Starts one hook's reductions to owners.

    ``pieces_of`` returns pieces by parameter, and raises if one has no owner.
    """

    def __init__(self, lanes: Lease, pieces_of: Callable[[Sequence[Tensor]], Sequence[Pieces]]) -> None:
        self.lanes = lanes
        self._pieces_of = pieces_of
        self._plans: dict[int, BucketOwnership] = {}

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all buckets so far."""
        return [param for ownership in self._plans.values() for param in ownership.params]

    def plan(self, bucket: GradBucket, size: int) -> BucketOwnership:
        """Return a bucket's ownership; cached until DDP rebuilds its buckets."""
        number, params = bucket.index(), bucket.parameters()
        known = self._plans.get(number)
        if known is None or len(known.params) != len(params) or not all(map(is_, known.params, params)):
            known = self._plans[number] = BucketOwnership.of(params, self._pieces_of(params), size)
        return known

    def launch(
        self,
        group: RankGroup,
        bucket: GradBucket,
        ownership: BucketOwnership,
        *,
        joined: bool,
        all_used: bool,
    ) -> OwnerReduction:
        """Start a bucket's reduction; all ranks call, in bucket order."""
        return OwnerReduction(group, self.lanes.groups, bucket, ownership, joined, all_used)


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
        if has_one_owner(pieces.values()):
            return None

        def owners(param: Tensor) -> tuple[int, int]:
            return pieces[param][0].owner, pieces[param][-1].owner

        return [
            sorted(filter(pieces.__contains__, members), key=owners)
            for members in self._optimizer.core.bucket_members()
        ]


def has_one_owner(pieces: Iterable[Pieces]) -> bool:
    """Whether one rank owns all of some parameters."""
    return len({piece.owner for of_param in pieces for piece in of_param}) == 1


def naming_buckets(hook: Hook, optimizer: ZeroRedundancyOptimizer) -> Hook:
    """Set ``hook.buckets`` to the optimizer's buckets; return the hook."""
    named: Any = hook
    named.buckets = NamedBuckets(optimizer)
    return hook
