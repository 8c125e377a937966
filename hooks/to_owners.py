"""`reduce_to_owners`, a comm hook that reduces gradients to the parameters' owners alone."""

from dataclasses import dataclass

import torch

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import LET_GO
from zero_optim.comm.lanes import Lease, lanes_for_rows
from zero_optim.compat.engine import (
    after_backward,
    backward_number,
    has_computed_all,
    in_backward,
    in_outer_backward,
)
from zero_optim.compat.streams import StreamBeside, future_on, record_use
from zero_optim.flow.flow import Flow
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture, gradients_in
from zero_optim.hooks.owners import NamedBuckets, OwnerGradients, OwnerReduction
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours

_NUM_UNDER_WAY = 2  # one is summed while the next is sent
_NO_OWNER = (
    "a parameter of shape {shape} of the wrapper is not in the optimizer, so it has no owner to reduce its "
    "gradient to: add it to the optimizer, or freeze it before wrapping"
)


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
    rank owns every parameter, the hook is an all-reduce.

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


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    """A bucket that is reduced, and DDP's future."""

    reduction: OwnerReduction
    done: TensorFuture
    lanes: Lease

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the sum, on a side stream, and give it to DDP."""
        try:
            result = self.reduction.wait()
        except BaseException:
            self.lanes.abandon()
            raise
        record_use(result)
        self.done.set_result(result)


class ReduceToOwners:
    """The hook: it reduces buckets, and sets partial gradients at the end of the backward pass.

    A later bucket's hook waits for a sum on the CPU; on an accelerator a side stream does. ``buckets``: those
    that our DDP takes.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.__name__ = self.__qualname__ = "reduce_to_owners"  # which DDP logs
        self.buckets = NamedBuckets(optimizer)
        self._optimizer = optimizer
        self._ranks = optimizer.ranks
        lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        agree_on_infinity = optimizer.iteration.agree_on_infinity
        self._gradients = OwnerGradients(optimizer, lanes, _NO_OWNER, agree_on_infinity)
        self._under_way = Flow(_NUM_UNDER_WAY, streams=StreamBeside())
        self._ending: set[int] = set()  # numbers of the engine's passes that will call `_end`

    def __deepcopy__(self, memo: object) -> "ReduceToOwners":
        """Return the hook itself, like a function: a copied DDP has the hook of the original."""
        return self

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's reduction, and wait for an earlier one."""
        # Our DDP also calls outside a backward pass, to end one that broke off; it raises afterwards.
        joined, group = getattr(bucket, "is_shadow", not in_backward()), self._ranks
        is_known = in_backward() and backward_number() in self._ending
        if bucket.index() == 0 and not is_known:  # else Note [Numbers of a static graph] in `stepper`
            self._begin(joined)
        if in_backward() and not is_known:
            self._ending.add(backward_number())
            after_backward(lambda: after_backward(self._end))  # behind the callback of DDP
        self._gradients.ownership(bucket)  # raises for parameters without an owner
        if self._gradients.has_one_owner:
            group.during("reduce").count_sum(bucket.buffer())
            return mean_hook(group.process_group, bucket)
        device = bucket.buffer().device
        done: TensorFuture = future_on(device)

        def begin() -> _Started:  # DDP itself finds out which parameters no rank used
            reduction = self._gradients.start(group, bucket, joined=joined, all_used=True)
            return _Started(reduction, done, self._gradients.lanes)

        self._under_way.start(begin, device=device)
        if bucket.is_last() or has_computed_all():  # perhaps no later hook comes, and DDP waits
            self._under_way.wait()
            if joined:  # no backward pass will end
                self._give_joined()
        return done

    def _begin(self, joined: bool) -> None:
        """Begin a pass, after one that may have broken off.

        RuntimeError, on every rank, if the optimizer was bound to another group or the last pass left
        gradients.
        """
        if self._optimizer.ranks is not self._ranks:
            raise RuntimeError(LET_GO)
        self._under_way.wait()
        self._ending = set()
        self._gradients.begin(joined=joined)

    def _give_joined(self) -> None:
        """Set this rank's own gradients after its inputs ended, as nobody else has them."""
        for params, buffer in self._gradients.reduced:
            self._optimizer.iteration.joins.drop_after_shadow(params)
            for param, view in zip(params, gradients_in(buffer, params), strict=True):
                param.grad = view.to(param.dtype, copy=True)
        self._end()

    def _end(self) -> None:
        """Set partial gradients after DDP has assigned its own.

        Reentrant checkpointing leaves this to the outermost pass. If that calls no hook, other ranks'
        gradients stay local.
        """
        if not in_outer_backward():
            self._gradients.set_partial()
