"""`zero_step`: a comm hook that steps a sharded optimizer during the backward pass, bucket by bucket."""

import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from zero_optim.comm.agreement import agree, check_flags, failing_together, raise_together
from zero_optim.hooks.allreduce import mean_hook
from zero_optim.hooks.bucket import GradBucket, Hook, name_of
from zero_optim.hooks.overlap.owners import naming_buckets
from zero_optim.hooks.overlap.stepper import Stepper
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.plan.description import describe


def zero_step(
    optimizer: ZeroRedundancyOptimizer,
    hook: Hook | None = None,
    *,
    interleave: bool = True,
    gradients: Literal["everywhere", "owners"] = "everywhere",
    ddp: DistributedDataParallel | None = None,
) -> Hook:
    """Make a comm hook that steps ``optimizer`` during the backward pass.

    ``ddp.register_comm_hook(state, zero_step(optimizer, hook))``, on PyTorch's DDP or ours; ``state`` is
    that of ``hook``. All ranks call, before the first backward pass. A bucket of the optimizer
    (``bucket_cap_mb``) is stepped and gathered when all its parameters are reduced. On gloo with parameters
    on the CPU a thread does it, and process groups for its gathers may be made here. Elsewhere hooks do it,
    on a stream beside the backward pass and on the optimizer's process group; ``hook`` must then complete a
    bucket's future without being called for a later one, unless ``interleave=False``.

    The parameters are, bit for bit, those of the same run with ``hook`` alone; for None those of the run
    without a hook, but for the last bits where DDP divides gradients: ``gradient_as_bucket_view=True`` with
    ``zero_grad(set_to_none=False)`` on a number of ranks that is no power of two.

    ``optimizer.step()`` after the backward pass finishes what the hook did not reach; a loop that never
    calls it is right as well, if DDP holds all of the optimizer's parameters. The learning rate counts as
    it is during the backward pass. Clipping and GradScaler come too late, and raise. Uneven inputs need
    ``Join([ddp, optimizer])``. When ``backward()`` has raised, call ``optimizer.wait_for_gathers()`` before
    training goes on. Autograd raises if a backward pass reads a parameter after its gradient is complete
    (``param.detach()`` in the forward pass). A hook with error feedback can give a gradient to a parameter
    that no rank used, which is stepped then.

    Args:
        optimizer: whose step. Its classes must be steppable in parts (``optimizer.explain()`` tells).
        hook: reduces the gradients; any hook of this package or PyTorch's. None stands for DDP's own mean.
        interleave: False steps nothing before the last bucket is on its way. Not for DDP's
            ``skip_all_reduce_unused_params``.
        gradients: "owners" reduces each gradient to its owner alone, in half the bytes, as
        `reduce_to_owners`. After
            backward ``param.grad`` is None on the other ranks, and for a cut parameter on every rank.
        ddp: the wrapper that the hook will be registered with; not needed for `zero_optim.ddp`. If its
            parameters may be unused, or for None, gradients that are all zeros are looked for, which takes
            time (on an accelerator the CPU waits), and their bucket is stepped when backward has ended.

    Raises:
        TypeError: on every rank, if ``optimizer`` is not sharded by this library, or another argument is of
            the wrong kind.
        ValueError: on every rank, if a class cannot be stepped in parts, or ``ddp`` may leave out the last
            bucket and ``interleave=False``; says why.
        RankMismatchError: on every rank, if ranks were given different arguments, or hooks of other code.
    """
    require_ours(optimizer)
    all_used = _agreed(optimizer, hook, interleave, gradients, ddp)
    hook, to_owners = mean_hook if hook is None else hook, gradients == "owners"
    stepper = Stepper(optimizer, hook, interleave=interleave, to_owners=to_owners, all_used=all_used)

    def zero_step_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return stepper.take(state, bucket)

    zero_step_hook.__qualname__ = zero_step_hook.__name__ = f"zero_step({name_of(hook)})"
    return naming_buckets(zero_step_hook, optimizer) if to_owners else zero_step_hook


def _agreed(
    optimizer: ZeroRedundancyOptimizer,
    hook: Hook | None,
    interleave: bool,
    gradients: str,
    ddp: DistributedDataParallel | None,
) -> Callable[[], bool]:
    """Check the arguments of `zero_step`, with the other ranks; returns `_all_used` of the wrapper."""
    with failing_together(optimizer.ranks):
        check_flags(interleave=interleave)
        _check_reduction(hook, gradients)
        if ddp is not None:
            _check_wrapper(ddp, interleave)
    all_used = _all_used(ddp)
    items = [f"hook {describe(hook, bound=False)}", f"interleave={interleave}", f"gradients={gradients!r}"]
    items.append(f"ddp={'None' if ddp is None else f'a wrapper whose parameters are all used: {all_used()}'}")
    agree(optimizer.ranks, items, "the arguments of zero_step")
    return all_used


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
        ValueError: a class cannot be stepped in parts, or ``ddp`` has ``skip_all_reduce_unused_params``.
    """
    _require_wrapper(ddp)
    return zero_step(zero, hook, interleave=False, ddp=ddp)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Make a comm hook under PyTorch's name for it: buckets are stepped one by one, as they are reduced.

    `zero_step`, which says the rest; arguments as in `hook_with_zero_step`.
    """
    _require_wrapper(ddp)
    return zero_step(zero, hook, ddp=ddp)


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


def _check_wrapper(ddp: object, interleave: bool) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"expected a DistributedDataParallel, got {type(ddp).__name__}")
    # PyTorch's wrapper of older versions does not have the option.
    skips = getattr(ddp, "skip_all_reduce_unused_params", False) and ddp.find_unused_parameters
    if skips and not interleave:
        raise ValueError(
            "the wrapper has skip_all_reduce_unused_params=True and may leave out the last bucket, which "
            "starts the step here: leave the option out, or use zero_step or hook_with_zero_step_interleaved"
        )


def _require_wrapper(ddp: object) -> None:
    try:
        _check_wrapper(ddp, interleave=True)
    except TypeError as error:
        raise_together(error)


def _all_used(ddp: DistributedDataParallel | None) -> Callable[[], bool]:
    """Return a function that says whether some rank uses every parameter of a wrapper in each backward pass.

    Without these options a bucket is full only when every gradient of it has come, in ``Join`` on the ranks
    with inputs left.
    """
    if ddp is None:
        return lambda: False
    reference = weakref.ref(ddp)  # the wrapper holds the hook

    def all_used() -> bool:
        wrapper = reference()
        return wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph

    return all_used
