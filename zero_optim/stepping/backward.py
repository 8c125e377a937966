"""Steps that are taken during the backward pass, and finished in ``step()``."""

from functools import partial
from typing import Any

from torch.optim import Optimizer

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.health.stamps import Call
from zero_optim.state.core import Core
from zero_optim.step.amp import drop_scale
from zero_optim.step.gradients import is_sparse
from zero_optim.step.join import lend_gradients
from zero_optim.step.overlap import Overlap, OverlappedStep
from zero_optim.stepping.calls import Calls
from zero_optim.stepping.joins import Joins


class BackwardSteps:
    """Begins and finishes steps that a comm hook takes during the backward pass. All ranks call.

    Args:
        core: the parts of the optimizer.
        calls: makes its calls.
        joins: what is known of ``Join``.
    """

    def __init__(self, core: Core, calls: Calls, joins: Joins) -> None:
        self._core = core
        self._calls = calls
        self._joins = joins
        self._overlap: Overlap | None = None  # made when a hook first asks for it

    @property
    def is_used(self) -> bool:
        """Whether a hook has asked for overlapped steps."""
        return self._overlap is not None

    @property
    def is_begun(self) -> bool:
        """Whether a step was begun in a backward pass, and not finished."""
        return self._overlap is not None and self._overlap.current is not None

    def overlap(self) -> Overlap:
        """Give what steps some parameters during the backward pass; a hook of `zero_optim.hooks` calls it.

        All ranks call; the first call makes process groups. Raises on every rank if a class cannot be stepped
        in parts.
        """
        core = self._core
        if self._overlap is None:
            with failing_together(core.group):
                core.owned.local.check_parts()
            self._overlap = Overlap(core.group, core.sharding, core.owned)
        return self._overlap

    def end(self, *, waits: bool) -> None:
        """Let go of what steps in the backward pass, if anything does; notes if that was half way."""
        core, overlap, self._overlap = self._core, self._overlap, None
        if overlap is not None and overlap.let_go(core.groups, waits=waits):
            core.snapshot.is_torn = core.snapshot.age > 0  # else it broke off before anything was stepped

    def wait(self) -> None:
        """Wait for steps on another thread or stream."""
        if self._overlap is not None:
            self._overlap.wait_for_steps()

    def begin(self, *, joined: bool) -> None:
        """Begin a step during the backward pass; the hook that `zero_step` made calls it on all ranks.

        It calls where the backward pass calls it, as this moves parameters that the user replaced: see Note
        [Moving parameters] in `zero_optim.shard.storage`. Communicates inside ``Join`` only, on the process
        group of the gathers; there the CPU waits. Raises if the step before was not finished, or its backward
        pass broke off.

        Args:
            joined: this rank ran out of inputs: it is lent the options of the others.
        """
        core, overlap, lends = self._core, self.overlap(), self._joins.under_way
        core.group.phase.traffic.count_step()
        lane, has_begun = overlap.lanes.groups[0], False

        def end(call: Call) -> None:
            if lends:
                lend_gradients(lane, joined, [], [], core.groups)
            if has_begun:  # else gathers may be under way to parameters that this pass has read
                core.sharding.begin_call(core.groups, call)
                # Now that the gathers of the pass before are over. What they tell is raised when this pass
                # has ended: the other ranks reduce its buckets, and wait for this one.
                current = overlap.current
                assert current is not None  # it has begun
                current.told = self._heard(lane, call)

        with self._calls.whatever_happens("backward()", end):
            overlap.begin(joined=joined, lends=lends)
            has_begun = True
            self._calls.prepare()

    def _heard(self, lane: RankGroup, call: Call) -> Exception | None:
        try:
            self._core.sharding.settle(lane.during("agree"), call, with_last=False)
        except (RemoteRankError, RankMismatchError) as error:
            return error
        return None

    def finish(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
        """Finish a step that was begun during the backward pass; False if none was."""
        overlap = self._overlap
        if overlap is None:
            return False
        if overlap.current is None:
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
        self.step_rest(late, joined=False)
        return True

    def step_rest(self, late: str, *, joined: bool) -> None:
        """Step what the backward pass did not reach, such as what DDP does not hold; all ranks call."""
        sharding, overlap = self._core.sharding, self.overlap()
        with self._calls.mirrored():
            overlap.wait_for_steps()  # on a rank that joined no backward pass has ended and done so
            lane = overlap.lanes.groups[0].during("agree")
            settle = partial(sharding.settle, lane, with_last=not sharding.gathers.readers)
            with self._calls.whatever_happens("step()", settle), overlap.finishing() as current:
                self._step_late(overlap, current, late, joined=joined)
        self._joins.end_step()

    def _step_late(self, overlap: Overlap, current: OverlappedStep, late: str, *, joined: bool) -> None:
        core, in_join = self._core, self._joins.under_way
        # What was put into a group by hand is in no bucket; the next pass refuses it.
        rest = [param for param in current.rest(core.groups) if overlap.bucket_of(param) is not None]
        failure: Exception | None = None
        try:
            if not joined:
                current.check_asked(late)
        except RuntimeError as error:
            if not in_join:
                raise
            failure = error
        if failure is None and not joined:
            try:
                core.check_sparse([param for param in rest if is_sparse(param.grad)])
                core.check_unreduced(in_join=in_join)
            except (ValueError, RuntimeError) as error:
                failure = error
        if in_join:  # ranks that joined wait for this; if one rank fails all raise
            lend_gradients(core.group, joined, *self._joins.lendable(rest), failure=failure)
        if rest:
            known = {param: None if failure is not None else param.grad for param in rest}
            overlap.step(core.groups, known, failure)
        if failure is not None:
            raise failure
