"""How an optimizer steps: after or in the backward pass, beside joined ranks, scalers and mirrors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall
from zero_optim.state.core import Core
from zero_optim.step.amp import Scaling, is_skipped_by_all
from zero_optim.step.clip import ClipArguments, clip_together
from zero_optim.step.join import Status, exchange, lend_to, ranks_that
from zero_optim.step.overlap import Overlap
from zero_optim.step.unreduced import unreduced_among
from zero_optim.stepping.backward import BackwardSteps
from zero_optim.stepping.calls import Calls
from zero_optim.stepping.joins import Joins, ShadowHook


class Stepping:
    """Steps what a rank owns, then gathers. All ranks call its methods together.

    Args:
        core: the parts of the optimizer.

    Attributes:
        calls: makes the calls that change parameters.
        joins: what is known of ``Join``.
        backward: steps during the backward pass.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.calls = Calls(core)
        self.joins = Joins(core)
        self.backward = BackwardSteps(core, self.calls, self.joins)

    def overlap(self) -> Overlap:
        """See `BackwardSteps.overlap`."""
        return self.backward.overlap()

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None, kwargs: dict[str, Any]
    ) -> float | None:
        """Prepare, step what this rank owns, and gather; see `ZeroRedundancyOptimizer.step`."""
        core = self._core
        self.joins.announce(steps=True)
        core.snapshot.steps += 1
        loss, left, failure = self._evaluate(closure)
        if self.backward.finish(optimizer, kwargs):
            return loss
        with self.calls.telling_replicas():
            if self._is_skipped(optimizer, kwargs.pop("grad_scaler", None), failure):
                return loss
        core.group.phase.traffic.count_step()
        settle = None if left is None else left.settle
        result = self.calls.run("step()", partial(core.owned.step, core.groups, left, **kwargs), settle)
        self.joins.end_step()
        return loss if result is None else result

    def _evaluate(
        self, closure: Callable[[], float] | None
    ) -> tuple[float | None, SharedCall | None, Exception | None]:
        """Evaluate the model before a step, unless that is left to the class's own step; all ranks call.

        Returns:
            The loss; the closure if it is left; and inside ``Join`` what it has raised, of which the others
            hear in the exchange that every step there begins with.
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
            if not in_join or self.backward.is_used:
                raise
            return None, None, error

    @property
    def _leaves_closure(self) -> bool:
        """Whether a closure may be left to the class's own step: leaves apart need its gradients before."""
        sharding = self._core.sharding
        if self.backward.is_used or self.joins.under_way or sharding.has_cuts:
            return False
        if unreduced_among(sharding.pieces):  # gradients are compared before the step
            return False
        return self._core.owned.takes_closures

    def _is_skipped(self, optimizer: Optimizer, scaler: object, failure: Exception | None) -> bool:
        """Tell whether the ranks skip a step; if they do not, gradients are as it needs them; all ranks call.

        Communicates only if a scaler is at work, or inside ``Join``: one collective of a byte. The CPU waits
        for that, once.

        Args:
            optimizer: of which scalers know.
            scaler: one that was given to ``step()``; None if there is none, or it has set attributes.
            failure: raised here already; inside ``Join`` alone, where the others hear of it.
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

    def agree_on_infinity(self, found_inf: Tensor) -> None:
        """Tell all scalers what any has found in gradients that are sharded; all ranks call as these look.

        One collective of 4 bytes; the CPU waits as for a sum of gradients. Inside ``Join`` it is one of a
        byte, and the CPU waits for it.

        Args:
            found_inf: 0-d or of one element, above zero on a rank that found one; afterwards on all ranks.
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
        """Clip all gradients by their global norm; all ranks call, but those that have joined."""
        if self.backward.is_begun:
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
            return clip_together(core.group, params, pieces, asked, core.inputs.forms.files)

    def join_hook(self) -> JoinHook:
        """Give ``Join`` what shadows the steps of the active ranks."""
        self.joins.join_hook()
        return ShadowHook(self.shadow)

    def shadow(self) -> None:
        """Take part in a step of the active ranks, after this one ran out of inputs."""
        core = self._core
        with self.joins.borrowing():
            if self.backward.is_begun:
                # The comm hook began the step: joined ranks run it too.
                self.backward.step_rest("", joined=True)
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
            self.calls.run("step()", partial(core.owned.step, core.groups, None))
        self.joins.end_step()
