"""`zero_step`, a comm hook that steps a sharded optimizer during the backward pass.

The hook of a full bucket starts its reduction. A thread, or the next hook, waits for it, then steps and
gathers the optimizer's full buckets (`passes`), in one order on every rank. The first hook begins the step,
while nothing else reads parameters. A callback behind DDP's does the rest.

Note [Backward passes within backward passes]
    Reentrant checkpointing runs one for each segment, in which the last bucket may become full. Some DDPs
    have not assigned gradients by then. So ``step()`` handles all-zero gradients, and late changes of
    gradients are not noticed.

Note [Numbers of a static graph]
    PyTorch's DDP reduces the first pass of a static graph in a final callback. Each bucket has number 0 then,
    and none is the last of several, so none waits for a later bucket.
"""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as _GradBucket  # type: ignore[attr-defined] # its stub exports nothing
from torch.nn.parallel import DistributedDataParallel

from zero_optim.comm.agreement import agreeing, check_flags, raise_together
from zero_optim.comm.collectives import RELEASED, RankGroup
from zero_optim.compat import autograd
from zero_optim.compat.streams import future_on
from zero_optim.ddp.reducer.reduction import Hook
from zero_optim.flow.pending import Waitable
from zero_optim.hooks.passes import SteppedBucket, SteppedPass
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.plan.description import describe

GradBucket: TypeAlias = _GradBucket  # or our DDP's, with the same methods


def zero_step(
    optimizer: ZeroRedundancyOptimizer,
    hook: Hook | None = None,
    *,
    interleave: bool = True,
    ddp: DistributedDataParallel | None = None,
) -> Hook:
    """Return a comm hook that steps ``optimizer`` during the backward pass.

    Use ``ddp.register_comm_hook(state, zero_step(optimizer, hook))``, on PyTorch's DDP or ours, with the
    state of ``hook``. All ranks call it before the first backward pass; it may create process groups. An
    optimizer's bucket (``bucket_cap_mb``) is stepped and gathered when all its trained parameters are
    reduced: by a thread on gloo with CPU parameters, else by hooks, several at once, on a side stream. There
    ``hook`` must complete a bucket's future without a later call, unless ``interleave=False``.

    Parameters equal, bit for bit, those of ``hook`` alone; with None those without a hook, but for the last
    bits if PyTorch's DDP divides (``gradient_as_bucket_view=True`` with ``zero_grad(set_to_none=False)``,
    ranks no power of two). ``optimizer.step()`` steps the rest; a loop may omit it if DDP holds all
    parameters. The learning rate is read during backward. Clipping and GradScaler come too late and raise.
    Uneven inputs need ``Join([ddp, optimizer])``. After a failed ``backward()`` call
    ``optimizer.wait_for_gathers()``. Autograd raises if backward reads a parameter after its gradient is
    complete.

    Args:
        optimizer: its classes must be steppable in parts (see ``optimizer.explain()``).
        hook: reduces the gradients; None for DDP's mean.
        interleave: False delays all steps until the last bucket's reduction has started.
        ddp: the hook's wrapper; not needed for `zero_optim.ddp`. If it allows unused parameters, or is None,
            all-zero gradients are searched (on an accelerator the CPU waits) and stepped after backward.

    Raises:
        TypeError: on every rank, if an argument is of the wrong kind on any.
        ValueError: on every rank, if a class cannot be stepped in parts, or ``interleave=False`` with DDP's
            ``skip_all_reduce_unused_params``.
        RankMismatchError: on every rank, if arguments or hook code differ.
    """
    require_ours(optimizer)
    with agreeing(optimizer.ranks, "the arguments of zero_step") as agreed:
        check_flags(interleave=interleave)
        if hook is not None and not callable(hook):
            raise TypeError(f"expected hook to be a comm hook, or None for allreduce_hook, got {hook!r}")
        if ddp is not None:
            _check_wrapper(ddp, interleave)
        wrapper = "None" if ddp is None else f"a wrapper whose parameters are all used: {_uses_all(ddp)}"
        agreed.items.append(f"hook {describe(hook, bound=False)}")
        agreed.items += [f"interleave={interleave}", f"ddp={wrapper}"]
    return ZeroStep(optimizer, hook, interleave=interleave, ddp=ddp)


def _uses_all(ddp: DistributedDataParallel | None) -> bool:
    """Whether a wrapper is known to use each parameter on some rank, in each pass."""
    return ddp is not None and not ddp.find_unused_parameters and not ddp.static_graph


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return ``zero_step(zero, hook, ddp=ddp)`` with ``interleave=False``, under PyTorch's name.

    ``shard_buckets`` is ignored; every rank steps the parameters that it owns. TypeError if ``ddp`` is no
    ``DistributedDataParallel``; otherwise raises as `zero_step`.
    """
    _require_wrapper(ddp)
    return zero_step(zero, hook, interleave=False, ddp=ddp)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return `zero_step`, which steps buckets as they are reduced; arguments as `hook_with_zero_step`."""
    _require_wrapper(ddp)
    return zero_step(zero, hook, ddp=ddp)


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


class ZeroStep:
    """The hook: it queues DDP's buckets for the step, and ends the step with the backward pass."""

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        hook: Hook | None,
        *,
        interleave: bool,
        ddp: DistributedDataParallel | None,
    ) -> None:
        self._hook = hook  # None for a mean
        inner = "mean_hook" if hook is None else getattr(hook, "__name__", type(hook).__name__)
        self.__name__ = self.__qualname__ = f"zero_step({inner})"  # which DDP logs
        self._optimizer = optimizer
        self._overlap = optimizer.iteration.overlap()
        self._interleave = interleave
        self._ddp = None if ddp is None else weakref.ref(ddp)  # which holds the hook
        self._pass: SteppedPass | None = None
        self._held: list[SteppedBucket] = []  # came, and are not queued yet
        self._ending: set[int] = set()  # the engine's numbers of the passes that will call `_end`

    def divides_by(self, state: dist.ProcessGroup | None) -> float | None:
        """Return by what our DDP divides gradients as it copies them; None if the hook does."""
        return dist.get_world_size(state) if self._hook is None else None

    def __deepcopy__(self, memo: object) -> "ZeroStep":
        """Return the hook itself, like a function: a copied DDP has the hook of the original."""
        return self

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's reduction and queue it."""
        number, params, backward = bucket.index(), bucket.parameters(), autograd.backward_number()
        joined = backward == autograd.NO_BACKWARD
        of, is_known = self._pass, not joined and backward in self._ending
        if of is None or (number <= of.number and not is_known):  # the pass before may have broken off
            of = self._new_pass(joined)
        of.came(number, is_last=bucket.is_last())
        if not joined and backward not in self._ending:  # perhaps of a pass that is new here
            self._ending.add(backward)
            autograd.after_backward(self._before_end)
        buffer = bucket.buffer()
        ddp = None if self._ddp is None else self._ddp()
        all_used = getattr(bucket, "all_used", False) or _uses_all(ddp)
        reduced = self._reduction(state, bucket)
        if buffer.is_sparse:
            # Every rank sees the same buckets, so all fail.
            with of.storing_errors():
                self._optimizer.core.check_sparse(params)
        done: torch.futures.Future[torch.Tensor] = future_on(buffer.device)
        self._held.append(SteppedBucket(of, params, buffer, reduced, all_used, done))
        has_all_gradients = autograd.in_backward() and not autograd.in_outer_backward()  # in a final callback
        if self._interleave or of.is_complete or has_all_gradients:
            self._put_held(of)
        if joined and of.is_complete:  # there is no backward pass to end
            autograd.after_pass(partial(self._end_joined, of))
        return done

    def _new_pass(self, joined: bool) -> SteppedPass:
        if self._overlap.group.is_released:
            raise RuntimeError(RELEASED)
        self._held, self._ending = [], set()
        self._pass = SteppedPass(self._overlap, joined)
        return self._pass

    def _reduction(self, state: Any, bucket: GradBucket) -> Waitable:  # noqa: ANN401 - the hook's
        ranks, about = self._overlap.group.during("reduce", is_exposed=False), f"bucket {bucket.index()}"
        if self._hook is not None:
            # A work, so that the watchdog sees who waits for the hook: PyTorch's DDP makes none.
            with ranks.begin_work(about, runs_hook=True) as work:
                work.take(self._hook(state, bucket))
            return work
        group, buffer = dist.group.WORLD if state is None else state, bucket.buffer()
        if group is not ranks.process_group:
            ranks = replace(RankGroup.of(group, buffer), phase=ranks.phase)
        if not getattr(bucket, "is_divided", False):  # as DDP without a hook, which divides views of a bucket
            buffer = buffer.div_(ranks.size) if buffer.is_sparse else buffer.mul_(1 / ranks.size)
        return ranks.start_sum(buffer, about)

    def _put_held(self, of: SteppedPass) -> None:
        if not of.has_begun:
            of.begin(self._optimizer)
        tasks, self._held = self._held, []
        for task in tasks:
            # From here on any moment may change them. Autograd has to refuse to read old values, and on this
            # thread it does so whatever the timing.
            torch.autograd.graph.increment_version(self._overlap.core.engine.known_of(task.params))
        under_way = self._overlap.under_way
        for task in tasks:
            under_way.start(task.begin, device=task.buffer.device, is_behind=True)
        if of.is_complete and not self._overlap.takes_thread:
            while under_way:  # no later hook steps the last bucket
                under_way.finish_first()

    def _before_end(self) -> None:
        """Queue `_end` behind DDP's callback; wait for the thread before DDP writes gradients."""
        autograd.after_backward(self._end)
        of, is_inner = self._pass, autograd.in_outer_backward()
        if self._overlap.takes_thread and of is not None and (of.is_complete or not is_inner):
            self._overlap.wait_for_steps()

    def _end(self) -> None:
        """Step late buckets after DDP has assigned the gradients; raise what failed."""
        of, is_inner = self._pass, autograd.in_outer_backward()
        if of is None or (is_inner and not of.is_complete):  # it has ended already, or more is to come
            return
        self._pass = None
        try:
            self._overlap.wait_for_steps()
            current = self._overlap.current
            if current is None:  # the step could not even begin
                self._overlap.send_header()
            else:
                try:
                    of.step_late(leaves_unsure=is_inner or current.lends, has_grads=True)
                finally:
                    self._overlap.end_backward(is_final=not is_inner, failed=of.error is not None)
        except BaseException:
            self._overlap.lanes.abandon()
            raise
        if of.error is not None:
            raise of.error

    def _end_joined(self, of: SteppedPass) -> None:
        self._pass = None
        self._overlap.wait_for_steps()
        current = self._overlap.current
        lends = current is None or current.lends  # step() lends owners the gradients
        of.step_late(leaves_unsure=lends, has_grads=False)
        self._overlap.send_header()
        if of.error is not None:
            raise of.error
