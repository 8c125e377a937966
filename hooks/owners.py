"""Gradients that `zero_step` reduces to their owners alone, in half the bytes of an all-reduce.

Owners add in the order of ranks, so sums are reproducible. In our DDP's buckets, from
`OwnerGradients.members`, a rank's part is summed in place; in another DDP's it is packed, and copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_optim.comm.lanes import Lease
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy, record_use, to_device
from zero_optim.ddp.owners.owner_bucket import Owners
from zero_optim.ddp.owners.owner_sums import OwnerSums
from zero_optim.hooks.grad_bucket import GradBucket, real_buffer
from zero_optim.iteration.joins import NO_JOIN
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import param_names
from zero_optim.plan.layout import Span, spans_of
from zero_optim.plan.slices import Slices
from zero_optim.step.partial import PartialGradient


class OwnerReduction:
    """The pending reduction of one bucket to owners, divided in place; all ranks construct it, in order."""

    def __init__(
        self, spans: Sequence[Sequence[Span]], sums: OwnerSums, bucket: GradBucket, *, all_used: bool
    ) -> None:
        self._group, self._spans = sums.inner, spans
        self._buffer = bucket.buffer()
        self._flat = real_buffer(bucket, "reduction to owners").div_(sums.inner.size)
        self._places: list[Tensor] = []  # of the sum, if it is not in place
        self.wait = sums.launch(self._rows, self._take_over, in_place=True).wait
        used = [param.grad is not None for param in bucket.parameters()]
        counts = torch.tensor(used, dtype=torch.int32, device="cpu")
        device = self._flat.device
        self._counted = None if all_used else self._group.start_sum(to_device(counts, device))

    def _rows(self) -> tuple[Tensor, Slices]:
        """Return the buffer, where its parts lie in the order of owners; else a copy that has them so."""
        rank, flat = self._group.rank, self._flat
        spans = list(chain.from_iterable(self._spans))
        owners = [span.owner for span in spans]
        lengths = [0] * self._group.size
        for owner, start, stop in spans:
            lengths[owner] += stop - start
        if owners != sorted(owners):
            parts = sorted(
                zip(owners, torch.split(flat, [s.stop - s.start for s in spans]), strict=True),
                key=itemgetter(0),
            )
            self._places = [part for owner, part in parts if owner == rank]
            flat = torch.cat([part for _, part in parts])
        return flat, Slices(rank, tuple(lengths))

    def _take_over(self, total: Tensor) -> Tensor:
        """Return the bucket's buffer, reduced only where this rank owns it."""
        if self._places:
            lengths = [place.numel() for place in self._places]
            private.foreach_copy_(self._places, list(torch.split(total, lengths)))
        record_use(self._flat)  # made on the stream of the hook
        return self._buffer

    def used(self) -> list[bool]:
        """By parameter: this rank owns elements, and some rank used it. After `wait`; the CPU may wait."""
        rank = self._group.rank
        used = [any(span.owner == rank for span in of_param) for of_param in self._spans]
        if self._counted is None:
            return used
        counts = self._counted.wait()
        record_use(counts)  # made on the stream of the hook
        numbers = self._group.read(HostCopy(counts)).tolist()
        return [is_own and number > 0 for is_own, number in zip(used, numbers, strict=True)]


@dataclass(eq=False)
class OwnerGradients:
    """The gradients that a hook reduces to owners; replaces ``param.grad`` where this rank lacks elements."""

    optimizer: ZeroRedundancyOptimizer
    lanes: Lease

    def __post_init__(self) -> None:
        self._reduced: list[tuple[Sequence[Tensor], Tensor]] = []  # parameters and buffer of each bucket
        self._last: list[Tensor] = []  # parameters that were reduced before this pass
        self._look()

    def _look(self) -> None:
        """Look at the optimizer's parameters, as there may be more."""
        core, ranks, pieces = self.optimizer.core, self.optimizer.ranks, self.optimizer.pieces()
        self._num_buckets = len(core.engine.buckets)
        names = dict(zip(core.params, param_names(core.groups), strict=True))
        self._owners = Owners(pieces, names, ranks.rank, ranks.size)
        self._spans = {
            param: spans_of(of_param, param.numel() * (1 + param.is_complex()))
            for param, of_param in pieces.items()
        }
        self._num_owners = len({piece.owner for of_param in pieces.values() for piece in of_param})

    @property
    def has_one_owner(self) -> bool:
        """Whether one rank of several owns every parameter: then hooks sum over all ranks."""
        return self._owners.size > 1 and self._num_owners == 1

    def begin(self) -> None:
        """Begin a pass; RuntimeError, on every rank, in ``Join``, or if gradients of the last are left."""
        self._reduced = []
        if self.optimizer.iteration.joins.under_way:
            raise RuntimeError(f"hooks that reduce gradients to owners take no part in Join: {NO_JOIN}")
        if self._num_buckets != len(self.optimizer.core.engine.buckets):
            self._look()
        left = next((param for param in self._last if isinstance(param.grad, PartialGradient)), None)
        if left is not None:
            raise RuntimeError(
                f"the gradient of {self._owners.names[left]} has been reduced to its owners: a second "
                "backward pass cannot add to it. Call zero_grad() after each step, and put all but the last "
                "backward pass of a step under no_sync()"
            )
        self._last = []

    def drop(self) -> None:
        """Forget what a pass has reduced: it raises."""
        self._reduced = []

    def reduce(self, sums: OwnerSums, bucket: GradBucket, *, all_used: bool) -> OwnerReduction:
        """Start a bucket's reduction."""
        params = bucket.parameters()
        reduction = OwnerReduction([self._spans[param] for param in params], sums, bucket, all_used=all_used)
        self._reduced.append((params, bucket.buffer()))
        return reduction

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if one of DDP's parameters has no owner."""
        num_lacking = sum(param not in self._spans for param in params)
        if num_lacking:
            raise ValueError(
                f"{num_lacking} parameters of the model are not in the optimizer, so they have no owner to "
                'reduce their gradients to: add them to it, or reduce gradients "everywhere"'
            )

    def set_partial(self) -> None:
        """Replace gradients of other owners by partial ones, after DDP has assigned the whole ones."""
        reduced, self._reduced = self._reduced, []
        for params, buffer in reduced:
            self._last += params
            memory = buffer.untyped_storage().data_ptr()  # DDP keeps it in any case
            for param in params:
                grad = param.grad
                if grad is not None and not isinstance(grad, PartialGradient):
                    is_view = grad.untyped_storage().data_ptr() == memory
                    param.grad = self._owners.shown_of_whole(param, grad, is_view=is_view)

    def members(self) -> list[list[Tensor]] | None:
        """Return each bucket's parameters in the order of owners; None if one rank owns all."""
        self._look()
        if self._num_owners == 1:
            return None
        ends = {param: (pieces[0].owner, pieces[-1].owner) for param, pieces in self._owners.pieces.items()}
        return [
            sorted(filter(ends.__contains__, bucket.params), key=ends.__getitem__)
            for bucket in self.optimizer.core.engine.buckets
        ]
