"""Stepping a sharded optimizer during the backward pass, bucket by bucket, as gradients are reduced.

What happens to a bucket, and when, is told in `zero_optim.hooks.overlap.stepper`.
"""

from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.arguments import check_flags, raise_together
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, name_of
from zero_optim.hooks.overlap.stepper import Stepper
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.description import describe


def zero_step(
    optimizer: ZeroRedundancyOptimizer,
    hook: Hook | None = None,
    *,
    interleave: bool = True,
    gradients: Literal["everywhere", "owners"] = "everywhere",
) -> Hook:
    """Make a comm hook that steps ``optimizer`` during the backward pass.

    ``ddp.register_comm_hook(state, zero_step(optimizer, hook))``, on PyTorch's DDP or ours; ``state`` is that
    of ``hook``. All ranks call, before the first backward pass; process groups for the gathers are made
    here, or taken over from an optimizer that is gone.

    The parameters are, bit for bit, those of the same run with ``hook`` alone; for None those of the run
    without a hook. One case differs in the last bits: ``gradient_as_bucket_view=True`` with
    ``zero_grad(set_to_none=False)``, without ``hook``, on a number of ranks that is no power of two, where
    DDP divides gradients that it multiplies by the inverse otherwise.

    ``optimizer.step()`` after the backward pass finishes what the hook did not reach; a loop that never calls
    it is right as well, as long as DDP holds all of the optimizer's parameters. The learning rate counts as
    it is during the backward pass. Clipping and GradScaler come too late then, and raise. Uneven inputs need
    ``Join([ddp, optimizer])``. When ``backward()`` has raised, part of the step may have been taken: call
    ``optimizer.wait_for_gathers()`` first if training is to go on.

    A backward pass must not read a parameter after its gradient is complete, as it would through
    ``param.detach()`` in the forward pass; autograd raises if it tries. A hook with error feedback can give a
    gradient to a parameter that no rank used; it is stepped then, and would not be without overlap.

    Args:
        optimizer: whose step. Its classes must be steppable in parts (``optimizer.explain()`` tells).
        hook: what reduces the gradients; any hook of this package or PyTorch's. None stands for the mean that
            DDP makes without a hook.
        interleave: False steps nothing before the last bucket is on its way, which leaves the processor to
            the backward pass as long as that runs. Not for DDP's ``skip_all_reduce_unused_params``.
        gradients: "owners" reduces each gradient to its owner alone (ZeRO stage 2): half the bytes of an
            all-reduce. When backward has ended ``param.grad`` is None on the other ranks. Gradients are
            summed in the order of ranks, so on more than two ranks the last bits differ from an all-reduce's.

    Raises:
        TypeError: on every rank, if ``optimizer`` is not sharded by this library, or another argument is of
            the wrong kind.
        ValueError: on every rank, if a class cannot be stepped in parts; says why.
        RankMismatchError: on every rank, if ranks were given different arguments, or hooks of other code.
    """
    _check_optimizer(optimizer)
    with failing_together(optimizer.ranks):
        check_flags(interleave=interleave)
        _check_reduction(hook, gradients)
    items = [f"hook {describe(hook, bound=False)}", f"interleave={interleave}", f"gradients={gradients!r}"]
    agree(optimizer.ranks, items, "the arguments of zero_step")
    overlap = optimizer.overlap()
    hook = mean_hook if hook is None else hook
    stepper = Stepper(optimizer, hook, interleave, overlap.new_lanes() if gradients == "owners" else None)

    def zero_step_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return stepper.take(state, bucket)

    zero_step_hook.__qualname__ = zero_step_hook.__name__ = f"zero_step({name_of(hook)})"
    return zero_step_hook


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Make a comm hook under PyTorch's name for it: steps begin when the last bucket is on its way.

    `zero_step` with ``interleave=False``, which says the rest.

    Args:
        hook: what reduces the gradients.
        ddp: the wrapper that it will be registered with.
        zero: whose step.
        shard_buckets: which ranks PyTorch's version gives a bucket to. Here a bucket's parameters keep their
            owners, and every rank steps what it owns of it; both values do the same.

    Raises:
        TypeError: ``ddp`` is no ``DistributedDataParallel``, or ``zero`` is not sharded by this library.
        ValueError: a class cannot be stepped in parts.
    """
    _check_wrapper(ddp)
    return zero_step(zero, hook, interleave=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Make a comm hook under PyTorch's name for it: a bucket is stepped as soon as it is reduced.

    `zero_step`, which says the rest; arguments as in `hook_with_zero_step`.
    """
    _check_wrapper(ddp)
    return zero_step(zero, hook)


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        kind = type(optimizer).__name__
        raise_together(TypeError(f"expected a zero_optim.ZeroRedundancyOptimizer, got {kind}"))


def _check_reduction(hook: object, gradients: object) -> None:
    if hook is not None and not callable(hook):
        raise TypeError(f"expected hook to be a comm hook, or None for allreduce_hook, got {hook!r}")
    if gradients not in ("everywhere", "owners"):
        raise ValueError(f'expected gradients to be "everywhere" or "owners", got {gradients!r}')
    if gradients == "owners" and hook is not None:
        name = name_of(hook)
        raise ValueError(
            f'gradients="owners" has a reduction of its own: leave out {name}, or reduce "everywhere"'
        )


def _check_wrapper(ddp: object) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise_together(TypeError(f"expected a DistributedDataParallel, got {type(ddp).__name__}"))
