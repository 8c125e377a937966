"""An optimizer's steps: after or in the backward pass, with joined ranks, scalers and mirrors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall, failing_together
from zero_optim.iteration.calls import Calls
from zero_optim.iteration.joins import Joins, ShadowHook
from zero_optim.iteration.overlap import Overlap
from zero_optim.state.core import Core
from zero_optim.step.amp import Scaling, drop_scale, is_skipped_by_all
from zero_optim.step.clip import ClipArguments, clip_together
from zero_optim.step.join import Status, exchange, lend_to, ranks_that
from zero_optim.step.unreduced import unreduced_among


class Iteration:
    """Steps what a rank owns, then gathers. All ranks call its methods together.

    ``calls``: calls that change parameters; ``joins``: the optimizer's side of ``Join``.
    """

    def __init__(self, core: Core) -> None:
        self.calls = Calls(core)
        self.joins = Joins(core)
        self._core = core
        self._overlap: Overlap | None = None

    # ------------------------------------------------------------------ during the backward pass

    def overlap(self) -> Overlap:
        """Return the `Overlap` for hooks of `zero_optim.hooks`.

        All ranks call; the first call makes process groups. Raises on every rank if a class cannot step in
        parts.
        """
        if self._overlap is None:
            with failing_together(self._core.group):
                self._core.owned.local.check_parts()
            self._overlap = Overlap(self._core, self.calls, self.joins)
        return self._overlap

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass began a step that is not finished."""
        return self._overlap is not None and self._overlap.current is not None

    def wait_for_steps(self) -> None:
        """Wait for steps on another thread or stream."""
        if self._overlap is not None:
            self._overlap.wait_for_steps()

    def end_overlap(self, *, waits: bool) -> None:
        """Release the process groups of overlapped steps; note an unfinished step."""
        core, overlap, self._overlap = self._core, self._overlap, None
        if overlap is not None and overlap.let_go(waits=waits):
            core.snapshot.is_torn = core.snapshot.age > 0  # else it broke off before anything was stepped

    def _finish_overlapped(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
        """Finish a step begun during the backward pass; False if none was."""
        if self._overlap is None:
            return False
        if self._overlap.current is None:
            if self._core.inputs.options.overlap_with_ddp:
                raise RuntimeError(
                    "overlap_with_ddp=True, but no step was taken during the backward pass: register the "
                    "hook, ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, "
                    "optimizer)), and run backward() outside no_sync() before step()"
                )
            return False
        late = ", ".join(kwargs)
        if drop_scale(optimizer):
            late = late or "GradScaler, whose factor was not taken out of the gradients"
        self._overlap.finish(late, joined=False)
        return True

    # ------------------------------------------------------------------ step()

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None, kwargs: dict[str, Any]
    ) -> float | None:
        """Prepare, step what this rank owns, and gather, as `ZeroRedundancyOptimizer.step`."""
        core = self._core
        self.joins.announce(steps=True)
        core.snapshot.steps += 1
        loss, left, failure = self._evaluate(closure)
        if self._finish_overlapped(optimizer, kwargs):
            return loss
        with self.calls.telling_replicas():
            if self._is_skipped(optimizer, kwargs.pop("grad_scaler", None), failure):
                return loss
        core.group.phase.traffic.count_step()
        at_end = None if left is None else left.settle
        result = self.calls.make("step()", partial(core.owned.step, core.groups, left, **kwargs), at_end)
        self.joins.end_step()
        return loss if result is None else result

    def _evaluate(
        self, closure: Callable[[], float] | None
    ) -> tuple[float | None, SharedCall | None, Exception | None]:
        """Evaluate the model before a step; all ranks call.

        Returns the loss; the closure if the class's own step evaluates it; and inside ``Join`` its error,
        which the next exchange sends.
        """
        if closure is None:
            return None, None, None
        in_join = self.joins.under_way
        shared = SharedCall(self._core.group, closure)
        if self._leaves_closure:
            return None, shared, None
        try:
            with torch.enable_grad():  # the gradients are needed before the class's own step begins
                return (closure() if in_join else shared()), None, None
        except Exception as error:
            if not in_join or self._overlap is not None:
                raise
            return None, None, error

    @property
    def _leaves_closure(self) -> bool:
        """Whether the class's own step may evaluate a closure."""
        sharding = self._core.sharding
        if self._overlap is not None or self.joins.under_way or sharding.has_cuts:
            return False
        if unreduced_among(sharding.pieces):  # gradients are compared before the step
            return False
        return self._core.owned.takes_closures

    def _is_skipped(self, optimizer: Optimizer, scaler: object, failure: Exception | None) -> bool:
        """Return whether the ranks skip a step; if not, unscale and lend gradients; all ranks call.

        Communicates only with a scaler, or inside ``Join``: one collective of a byte; the CPU waits.
        """
        core, in_join = self._core, self.joins.under_way
        scaling = None
        if failure is None:
            try:
                core.check_unreduced(in_join=in_join)
                if in_join:
                    core.check_sparse(core.sparse_cut_params())
                scaling = Scaling.of(optimizer, scaler)
            except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
                failure = error
        if scaling is None and failure is None and not in_join:
            return False
        word = Status.NOTHING if scaling is None else scaling.status
        found_inf = None if scaling is None else scaling.found_inf
        words = exchange(core.group, word, found_inf=found_inf, failure=failure)
        if scaling is not None:
            if scaling.is_skipped(optimizer, words, core.group.rank):
                core.mirror.relabel(core.snapshot.steps)
                return True
            scaling.unscale(core.params)
        lend_to(core.group, ranks_that(words, Status.JOINED), *self.joins.lendable(core.params))
        return False

    # ------------------------------------------------------------------ beside a step

    def agree_on_infinity(self, found_inf: Tensor) -> None:
        """Set the scalers' ``found_inf`` if any rank saw an infinity in sharded gradients; all ranks call.

        One collective of 4 bytes, inside ``Join`` of a byte; the CPU waits. ``found_inf``: 0-d or of one
        element, above zero on a rank with an infinity; afterwards on all ranks.
        """
        group = self._core.group
        with group.doing("GradScaler.unscale_()"):
            if self.joins.under_way:
                self.joins.announce(steps=False)
                words = exchange(group, Status.UNSCALES, found_inf=found_inf)
                found_inf.fill_(bool(ranks_that(words, Status.INFINITE)))
            elif group.size > 1:
                group.start_sum(found_inf)[1].wait()

    def clip(self, asked: ClipArguments) -> Tensor:
        """Clip all gradients by their global norm; all ranks call, except joined ones."""
        if self.has_begun:
            failure = RuntimeError(
                "the step was taken during the backward pass, too early to clip: leave out "
                "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
            )
            self.joins.announce(steps=False)
            self.joins.refuse(failure)
            raise failure
        core = self._core
        with core.group.doing("clip_grad_norm_()"):
            params, pieces, groups = self.joins.lendable(core.params)
            if self.joins.under_way:
                self.joins.announce(steps=False)
                group = core.group.during("clip")
                words = exchange(group, Status.CLIPS)
                lend_to(group, ranks_that(words, Status.JOINED), params, pieces, groups, asked.to_send())
            return clip_together(core.group, params, pieces, asked, core.inputs.store.files)

    def join_hook(self) -> JoinHook:
        """Return the ``Join`` hook that shadows the active ranks' steps."""
        self.joins.join_hook()
        return ShadowHook(self.shadow)

    def shadow(self) -> None:
        """Take part in a step of the active ranks, on a rank without inputs."""
        core = self._core
        with self.joins.borrowing():
            if self.has_begun:  # by the comm hook: joined ranks run it too
                self.overlap().finish("", joined=True)
                return
            group, lendable = core.group, self.joins.lendable(core.params)
            words = exchange(group, Status.JOINED)
            while ranks_that(words, Status.CLIPS) or ranks_that(words, Status.UNSCALES):
                if ranks_that(words, Status.CLIPS):
                    asked = lend_to(group.during("clip"), ranks_that(words, Status.JOINED), *lendable)
                    clip_together(group, *lendable[:2], ClipArguments.received(asked))
                words = exchange(group, Status.JOINED)
            if is_skipped_by_all(words):
                return
            lend_to(group, ranks_that(words, Status.JOINED), *lendable)
            group.phase.traffic.count_step()
            self.calls.make("step()", partial(core.owned.step, core.groups, None))
        self.joins.end_step()
