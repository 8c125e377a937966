"""`reduce_to_owners`, a comm hook that reduces gradients to the parameters' owners alone."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import LET_GO
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.compat.engine import after_backward, backward_number, in_backward, in_outer_backward
from zero_optim.compat.streams import StreamBeside, future_on, record_use, recorded_event, wait_for_event
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture, gradients_in
from zero_optim.hooks.overlap.owners import BucketsToOwners, OwnerReduction, has_one_owner, naming_buckets
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.plan.groups import param_names, params_of
from zero_optim.plan.pieces import Pieces, piece_of
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import PartialGradient, owned

_NUM_UNDER_WAY = 2  # one is summed while the next is sent


def reduce_to_owners(optimizer: ZeroRedundancyOptimizer) -> Hook:
    """Return a comm hook that reduces each gradient to its owner alone, in half the bytes of an all-reduce.

    Use ``ddp.register_comm_hook(None, reduce_to_owners(optimizer))``, on PyTorch's DDP or ours. All ranks
    call it before the first backward pass; it may create process groups. After ``backward()`` the owner has
    the mean in ``param.grad``; other ranks have a `PartialGradient`, without memory, which raises if read.
    Our DDP takes the optimizer's buckets and ``bucket_cap_mb``. DDP's buckets stay as large as all gradients;
    to save memory use `zero_optim.ddp.ShardedDataParallel`.

    Gradients are divided by the number of ranks and added in their order, bf16 and fp16 in float32 with one
    rounding; two ranks get the bits of DDP without a hook. To accumulate, use ``no_sync()`` for all but the
    last backward pass of a step; after a reduced pass call ``zero_grad()``, or the next pass raises. If one
    rank owns every parameter, the hook is an all-reduce.

    Args:
        optimizer: owns every parameter of the wrapper; gradients are dense.

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
    reductions = _OwnerReductions(optimizer)

    def reduce_to_owners_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return reductions.take(bucket)

    reduce_to_owners_hook.__qualname__ = reduce_to_owners_hook.__name__ = "reduce_to_owners"
    return naming_buckets(reduce_to_owners_hook, optimizer)


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    """A started bucket, and DDP's future."""

    reduction: OwnerReduction
    done: TensorFuture
    device: torch.device


class _OwnerReductions:
    """Reduces buckets, and sets partial gradients at the end of the backward pass.

    A later bucket's hook waits for a sum on the CPU; on an accelerator a side stream does.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer
        self._ranks = optimizer.ranks
        lanes = lanes_for_rows(optimizer.ranks, optimizer.owners())
        self._to_owners = BucketsToOwners(lanes, partial(_pieces_of, optimizer))
        self._streams = StreamBeside()
        self._under_way: deque[_Started] = deque()
        self._asked: set[int] = set()  # numbers of the engine's passes that will call `_end`
        self._came: list[tuple[Sequence[Tensor], Tensor]] = []  # parameters and buffer of each bucket
        self._names: dict[Tensor, str] = {}
        self._has_one_owner = False
        self._num_known = 0  # of the optimizer's buckets

    def take(self, bucket: GradBucket) -> TensorFuture:
        """Start a bucket's reduction, and wait for an earlier one."""
        # Our DDP also calls outside a backward pass, to end one that broke off; it raises afterwards.
        joined, number = getattr(bucket, "is_shadow", not in_backward()), bucket.index()
        if number == 0:
            self._begin(joined)
        if in_backward() and backward_number() not in self._asked:
            self._asked.add(backward_number())
            after_backward(lambda: after_backward(self._end))  # behind the callback of DDP
        if len(self._under_way) == _NUM_UNDER_WAY:
            self._finish_first()
        group, buffer = self._ranks, bucket.buffer()
        ownership = self._to_owners.plan(bucket, group.size)
        if self._has_one_owner:
            group.during("reduce").count_sum(buffer)
            return mean_hook(group.process_group, bucket)
        # DDP itself finds out which parameters no rank used.
        reduction = self._to_owners.launch(group, bucket, ownership, joined=joined, all_used=True)
        started = _Started(reduction, future_on(buffer.device), buffer.device)
        self._under_way.append(started)
        self._came.append((ownership.params, buffer))
        if bucket.is_last():  # no later hook comes, and DDP waits
            while self._under_way:
                self._finish_first()
            self._streams.join()
            if joined:  # no backward pass will end
                self._give_joined()
        return started.done

    def _begin(self, joined: bool) -> None:
        """Begin a pass, after one that may have broken off.

        RuntimeError, on every rank, if the optimizer was bound to another group or the last pass left
        gradients.
        """
        if self._optimizer.ranks is not self._ranks:
            raise RuntimeError(LET_GO)
        while self._under_way:
            self._finish_first()
        self._asked, self._came = set(), []
        if self._num_known != len(self._optimizer.core.sharding.buckets):
            self._num_known = len(self._optimizer.core.sharding.buckets)
            self._look()
        known = [] if joined else self._to_owners.params
        left = [param for param in known if isinstance(param.grad, PartialGradient)]
        if left:
            raise RuntimeError(
                f"the gradient of {self._names[left[0]]} has been reduced to its owners: a second backward "
                "pass cannot add to it. Call zero_grad() after each step, and put all but the last backward "
                "pass of a step under no_sync()"
            )

    def _look(self) -> None:
        groups = self._optimizer.param_groups
        self._names = dict(zip(params_of(groups), param_names(groups), strict=True))
        self._has_one_owner = self._ranks.size > 1 and has_one_owner(self._optimizer.pieces().values())

    @torch.no_grad()
    def _finish_first(self) -> None:
        started = self._under_way.popleft()
        here = recorded_event(started.device)
        with self._streams.using(started.device):
            wait_for_event(started.device, here)
            try:
                result = started.reduction.wait()
            except BaseException:
                self._to_owners.lanes.abandon()
                raise
            record_use(result)
            started.done.set_result(result)

    def _give_joined(self) -> None:
        """Set this rank's own gradients after its inputs ended, as nobody else has them."""
        for params, buffer in self._came:
            self._optimizer.iteration.joins.drop_after_shadow(params)
            for param, view in zip(params, gradients_in(buffer, params), strict=True):
                param.grad = view.to(param.dtype, copy=True)
        self._end()

    def _end(self) -> None:
        """Set partial gradients after DDP has assigned its own.

        Reentrant checkpointing leaves this to the outermost pass. If that calls no hook, other ranks'
        gradients stay local.
        """
        if in_outer_backward():
            return
        came, self._came = self._came, []
        pieces, rank = self._optimizer.pieces(), self._optimizer.ranks.rank
        for param, buffer in ((param, buffer) for params, buffer in came for param in params):
            grad, of_param = param.grad, pieces[param]
            piece = piece_of(of_param, rank)
            if grad is None or isinstance(grad, PartialGradient):
                continue
            if piece is not None and len(of_param) == 1:
                owned(grad, self._optimizer.iteration.agree_on_infinity)
                continue
            rows = None if piece is None else rows_of(grad, piece)
            if rows is not None and not _is_in(rows, buffer):
                rows = rows.clone()  # a view would keep the whole gradient; DDP keeps its bucket in any case
            agree = self._optimizer.iteration.agree_on_infinity
            param.grad = PartialGradient(param, of_param, rows, self._names[param], agree=agree)


def _is_in(view: Tensor, buffer: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _pieces_of(optimizer: ZeroRedundancyOptimizer, params: Sequence[Tensor]) -> list[Pieces]:
    pieces = optimizer.pieces()
    for param in params:
        if param not in pieces:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} of the wrapper is not in the optimizer, "
                "so it has no owner to reduce its gradient to: add it to the optimizer, or freeze it before "
                "wrapping"
            )
    return [pieces[param] for param in params]
