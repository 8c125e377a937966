"""`zero_step`, a comm hook that steps a sharded optimizer during the backward pass."""

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
    """Return a comm hook that steps ``optimizer`` during the backward pass.

    Use ``ddp.register_comm_hook(state, zero_step(optimizer, hook))``, on PyTorch's DDP or ours, with the
    state of ``hook``. All ranks call it before the first backward pass. When all parameters of an optimizer's
    bucket (``bucket_cap_mb``) are reduced, the bucket is stepped and gathered: by a thread on gloo with CPU
    parameters, which may create process groups, else by hooks on a side stream. There ``hook`` must complete
    a bucket's future without a later call, unless ``interleave=False``.

    Parameters equal, bit for bit, those of ``hook`` alone; with None those without a hook, but for the last
    bits where DDP divides (``gradient_as_bucket_view=True`` with ``zero_grad(set_to_none=False)``, ranks no
    power of two). ``optimizer.step()`` steps the rest; a loop may omit it if DDP holds all parameters. The
    learning rate is read during backward. Clipping and GradScaler come too late and raise. Uneven inputs need
    ``Join([ddp, optimizer])``. After a failed ``backward()`` call ``optimizer.wait_for_gathers()``. Autograd
    raises if backward reads a parameter after its gradient is complete. With error feedback an unused
    parameter may get a gradient, and is stepped.

    Args:
        optimizer: its classes must be steppable in parts (see ``optimizer.explain()``).
        hook: reduces the gradients; None for DDP's mean.
        interleave: False delays all steps until the last bucket's reduction has started.
        gradients: "owners" reduces as `reduce_to_owners`; ``param.grad`` is then None on other ranks, and
            for a cut parameter on every rank.
        ddp: the hook's wrapper; not needed for `zero_optim.ddp`. If it allows unused parameters, or is None,
            all-zero gradients are searched (on an accelerator the CPU waits) and stepped after backward.

    Raises:
        TypeError: on every rank, if an argument is of the wrong kind on any.
        ValueError: on every rank, if a class cannot be stepped in parts, or ``interleave=False`` with DDP's
            ``skip_all_reduce_unused_params``.
        RankMismatchError: on every rank, if arguments or hook code differ.
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
    """Check `zero_step`'s arguments on all ranks; return `_all_used` of the wrapper."""
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
    """Return `zero_step` with ``interleave=False``, under PyTorch's name.

    Args:
        hook: reduces the gradients.
        ddp: the hook's wrapper.
        zero: the optimizer to step.
        shard_buckets: ignored; every rank steps the parameters that it owns.

    Raises:
        TypeError: ``ddp`` is no ``DistributedDataParallel``, or ``zero`` is not sharded by this library.
        ValueError: a class cannot be stepped in parts, or ``ddp`` has ``skip_all_reduce_unused_params``.
    """
    _require_wrapper(ddp)
    return zero_step(zero, hook, interleave=False, ddp=ddp)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return `zero_step`, which steps buckets as they are reduced, under PyTorch's name.

    The arguments are those of `hook_with_zero_step`.
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

    Without DDP's options for unused parameters, a bucket is full only when all its gradients have come.
    """
    if ddp is None:
        return lambda: False
    reference = weakref.ref(ddp)  # the wrapper holds the hook

    def all_used() -> bool:
        wrapper = reference()
        return wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph

    return all_used
