"""`reduce_to_owners`: reduction of gradients to their owners alone, in half the bytes of an all-reduce.

ZeRO stage 2. Owners add in the order of ranks, so sums are reproducible. In our DDP's buckets, from
`OwnerGradients.members`, a rank's part is summed in place; in another DDP's it is packed, and copied back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from weakref import WeakMethod

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import RELEASED
from zero_optim.comm.lanes import Lease, lanes_for_rows
from zero_optim.compat import autograd, private
from zero_optim.compat.streams import HostCopy, StreamBeside, future_on, record_use, to_device
from zero_optim.ddp.owners.owner_bucket import Owners
from zero_optim.ddp.owners.owner_sums import OwnerSums
from zero_optim.hooks.grad_bucket import GradBucket, Hook, TensorFuture, mean_hook, real_buffer
from zero_optim.iteration.joins import NO_JOIN
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.plan.groups import param_names
from zero_optim.plan.layout import Span, spans_of
from zero_optim.plan.slices import Slices
from zero_optim.step.partial import Agree, PartialGradient

_NO_OWNER = (
    "a parameter of shape {shape} of the wrapper is not in the optimizer, so it has no owner to reduce its "
    "gradient to: add it to the optimizer, or freeze it before wrapping"
)


class OwnerReduction:
    """The pending reduction of one bucket to owners, divided in place; all ranks construct it, in order."""

    def __init__(
        self,
        gradients: "OwnerGradients",
        line: OwnerSums,
        bucket: GradBucket,
        *,
        all_used: bool,
        then: Callable[[Tensor], object] | None = None,  # takes the buffer
    ) -> None:
        self._group, self._then = line.inner, then
        self._spans = gradients.spans(bucket)
        self._buffer = bucket.buffer()
        self._flat = real_buffer(bucket, "reduction to owners").div_(line.inner.size)
        self._places: list[Tensor] = []  # of the sum, if it is not in place
        self.wait = line.launch(self._rows, self._take_over, in_place=True).wait
        used = [param.grad is not None for param in bucket.parameters()]
        counts = torch.tensor(used, dtype=torch.int32, device="cpu")
        device = self._flat.device
        self._counted = None if all_used else self._group.start_sum(to_device(counts, device))
        gradients.reduced.append((bucket.parameters(), self._buffer))

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
        if self._then is not None:
            self._then(self._buffer)
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
    no_owner: str  # the error for parameters without an owner, their {number} and the first {shape}
    agree: Agree | None = None  # Note [Infinities in sharded gradients] in `zero_optim.step.partial`

    def __post_init__(self) -> None:
        self.reduced: list[tuple[Sequence[Tensor], Tensor]] = []  # parameters and buffer of each bucket
        self._last: list[Tensor] = []  # parameters that were reduced before this pass
        self._look()

    def _look(self) -> None:
        """Look at the optimizer's parameters, as there may be more."""
        core, ranks, pieces = self.optimizer.core, self.optimizer.ranks, self.optimizer.pieces()
        self._version = self.version()
        names = dict(zip(core.params, param_names(core.groups), strict=True))
        self._owners = Owners(pieces, names, ranks.rank, ranks.size, self.agree)
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
        self.reduced = []
        if self.optimizer.iteration.joins.under_way:
            raise RuntimeError(f"hooks that reduce gradients to owners take no part in Join: {NO_JOIN}")
        if self._version != self.version():
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
        self.reduced = []

    def spans(self, bucket: GradBucket) -> list[list[Span]]:
        """Return the owners' parts of each parameter, in real numbers; ValueError if one has no owner."""
        params = bucket.parameters()
        lacking = [param for param in params if param not in self._spans]
        if lacking:
            shape = tuple(lacking[0].shape)
            raise ValueError(self.no_owner.format(number=len(lacking), shape=shape))
        return [self._spans[param] for param in params]

    def set_partial(self) -> None:
        """Replace gradients of other owners by partial ones, after DDP has assigned the whole ones."""
        reduced, self.reduced = self.reduced, []
        for params, buffer in reduced:
            self._last += params
            memory = buffer.untyped_storage().data_ptr()  # DDP keeps it in any case
            for param in params:
                grad = param.grad
                if grad is not None and not isinstance(grad, PartialGradient):
                    is_view = grad.untyped_storage().data_ptr() == memory
                    param.grad = self._owners.shown_of_whole(param, grad, is_view=is_view)

    def version(self) -> int:
        """Return a number that changes when the optimizer gets more parameters."""
        return len(self.optimizer.core.engine.buckets)

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
        lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        agree_on_infinity: Agree = WeakMethod(optimizer.iteration.agree_on_infinity)
        self.buckets = self._gradients = OwnerGradients(optimizer, lanes, _NO_OWNER, agree_on_infinity)
        self._line = OwnerSums(optimizer.ranks, lanes, streams=StreamBeside())
        self._ending: set[int] = set()  # numbers of the engine's passes that will call `_end`

    def __deepcopy__(self, memo: object) -> "ReduceToOwners":
        """Return the hook itself, like a function: a copied DDP has the hook of the original."""
        return self

    @torch.no_grad()
    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's reduction, and wait for an earlier one."""
        # Our DDP also calls outside a backward pass, to end one that broke off; it raises afterwards.
        line, group = self._line, self._line.inner
        is_known = autograd.in_backward() and autograd.backward_number() in self._ending
        if bucket.index() == 0 and not is_known:  # else Note [Numbers of a static graph] in `stepper`
            if self._optimizer.ranks is not group:
                raise RuntimeError(RELEASED)
            line.finish()  # what a pass that broke off has left
            self._ending = set()
            self._gradients.begin()
        if autograd.in_backward() and not is_known:
            self._ending.add(autograd.backward_number())
            autograd.after_backward(lambda: autograd.after_backward(self._end))  # behind the callback of DDP
        self._gradients.spans(bucket)  # raises for parameters without an owner
        if self._gradients.has_one_owner:
            group.during("reduce").count_sum(bucket.buffer())
            return mean_hook(group.process_group, bucket)
        done: TensorFuture = future_on(bucket.buffer().device)
        # DDP itself finds out which parameters no rank used
        OwnerReduction(self._gradients, line, bucket, all_used=True, then=done.set_result)
        if bucket.is_last() or autograd.has_computed_all():  # perhaps no later hook comes, and DDP waits
            line.finish()
        return done

    def _end(self) -> None:
        """Set partial gradients after DDP has assigned its own, at the end of the outermost pass."""
        if not autograd.in_outer_backward():
            self._gradients.set_partial()
