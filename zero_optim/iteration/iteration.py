"""An optimizer's steps: after or in the backward pass, with joined ranks and scalers."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.flow.schedule import OVERLAP, Moment
from zero_optim.iteration.joins import STEP_OF_JOIN, Joins, ShadowHook
from zero_optim.iteration.overlap import Overlap
from zero_optim.iteration.tasks import StepTask
from zero_optim.state import rebinding
from zero_optim.state.core import Core
from zero_optim.step.amp import Scaling, drop_scale
from zero_optim.step.clip import ClipArguments, NormSlots, clip_alone, clip_together
from zero_optim.step.join import Status, exchange, ranks_that

T = TypeVar("T")


class Iteration:
    """Steps what a rank owns, then gathers. All ranks call its methods together."""

    def __init__(self, core: Core) -> None:
        self.joins = Joins(core)
        self._core = core
        self._overlap: Overlap | None = None
        self._norm_slots: NormSlots | None = None

    # ------------------------------------------------------------------ step()

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None, kwargs: dict[str, Any]
    ) -> float | None:
        """Prepare, step what this rank owns, and gather, as `ZeroRedundancyOptimizer.step`."""
        core, in_join = self._core, self.joins.announce()
        core.snapshot.count_step()
        if not in_join:  # where ranks take other numbers of steps
            core.ranks.works.note_failure("")
        loss, shared, failure = (None, None, None) if closure is None else self._evaluate(closure, in_join)
        if self._overlap is not None and self._finish_overlapped(self._overlap, optimizer, kwargs):
            return loss
        try:
            if not self._ready_gradients(optimizer, failure, shared, in_join):
                return loss
        except BaseException as error:
            core.engine.report_to_replicas(error)
            raise
        result = self._step_rows(shared, in_join, **kwargs)
        return loss if result is None else result

    def _step_rows(self, shared: SharedCall | None, in_join: bool, /, **kwargs: object) -> float | None:
        core = self._core
        core.ranks.phase.traffic.count_step()
        if shared is None and not in_join:
            core.sample_gradients()
        work = partial(core.owned.step, core.groups, shared, None, **kwargs)
        some = partial(core.owned.step, core.groups, None, **kwargs) if core.inputs.held else None
        after_work = None if shared is None else shared.finish
        result = self._run(StepTask(core, "step()", work, after_work, some))
        if in_join:
            self.joins.end_step()
        return result

    def _run(self, task: StepTask[T]) -> T:
        """Change this rank's parameters, then gather."""
        engine = self._core.engine
        try:
            engine.on(Moment.STEP, engine.buckets, task)
        except BaseException as error:
            engine.report_to_replicas(error)
            raise
        return task.result

    def _evaluate(
        self, closure: Callable[[], float], in_join: bool
    ) -> tuple[float | None, SharedCall | None, Exception | None]:
        """Return the loss, the closure if the class's own step evaluates it, its error inside ``Join``."""
        core = self._core
        is_ready = self._overlap is not None or in_join or bool(core.sharding.cut_params or core.inputs.held)
        if not is_ready and core.owned.takes_closures:
            return None, SharedCall(core.group, closure, partial(core.compare_unreduced, in_join=False)), None
        try:
            # Gradients are needed before the class's own step begins.
            with torch.enable_grad(), failing_together(None if in_join else core.group):
                return closure(), None, None
        except Exception as error:
            if not in_join or self._overlap is not None:
                raise
            return None, None, error

    def _ready_gradients(
        self, optimizer: Optimizer, failure: Exception | None, shared: object, in_join: bool
    ) -> bool:
        """Check, unscale and lend gradients; all ranks call. False if a scaler found an infinity on any."""
        core, scaling = self._core, None
        if failure is None:
            try:
                if shared is None:  # else the class evaluates the closure, and they are checked then
                    core.compare_unreduced(in_join=in_join)
                if in_join:
                    core.check_gradients()
                scaling = Scaling.read(optimizer)
            except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
                failure = error
        if scaling is None and failure is None and not in_join:
            return True
        status, found_inf = (Status.NOTHING, None) if scaling is None else (Status.DEAF, scaling.found_inf)
        clips = self.joins.take_clips()
        statuses = exchange(core.group, status, found_inf=found_inf, failure=failure, clips=clips)
        if scaling is not None:
            if ranks_that(statuses, Status.INFINITE):
                return False
            scaling.unscale(core.params)
        self.joins.lend(core.group, statuses)
        return True

    # ------------------------------------------------------------------ during the backward pass

    def overlap(self) -> Overlap:
        """Return the `Overlap` for hooks; all ranks call. Raises on all if a class cannot step in parts."""
        if self._overlap is None:
            with failing_together(self._core.group):
                self._core.owned.local.require_parts()
            self._overlap = Overlap(self._core, self.joins)
            self._core.engine.run_by(OVERLAP)
        return self._overlap

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass began a step that is not finished."""
        return self._overlap is not None and self._overlap.current is not None

    @property
    def stepping(self) -> AbstractContextManager[object]:
        """What keeps another thread from stepping meanwhile; it waits for no other rank."""
        return nullcontext() if self._overlap is None else self._overlap.stepping

    def wait_for_steps(self) -> None:
        """Wait for steps on another thread or stream."""
        if self._overlap is not None:
            self._overlap.wait_for_steps()

    def _finish_overlapped(self, overlap: Overlap, optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
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
        overlap.finish(late, joined=False)
        return True

    # ------------------------------------------------------------------ process groups that end

    def detach(self, *, wait: bool) -> None:
        """Release the process group, as `ZeroRedundancyOptimizer.detach`."""
        core = self._core
        if core.inputs.store.params or core.inputs.held:
            raise RuntimeError(
                "the optimizer of a fully sharded model cannot be detached: each rank holds a part of the "
                "parameters. Save a checkpoint, build model and optimizer anew, and load it"
            )
        overlap, self._overlap = self._overlap, None
        if overlap is not None and overlap.release(waits=wait):
            core.snapshot.tear()
        core.release(waits=wait)
        self.joins.release()

    def rebind(self, group: RankGroup, *, keep_state: bool) -> None:
        """Go on in another group; all its ranks call."""
        rebinding.rebind(self._core, group, keep_state=keep_state)
        if self._core.inputs.options.overlap_with_ddp:
            self.overlap()

    # ------------------------------------------------------------------ beside a step

    def forwarded_method(self, name: str, matches: list[Any]) -> Any:  # noqa: ANN401 - whatever the class has
        """Return an attribute of the local optimizers; a method is called on all of them, then gathers."""
        if not inspect.ismethod(matches[0]):
            return matches[0]
        core = self._core

        def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - what the class returns
            core.check_attached()
            work = partial(core.owned.local.call, core.groups, matches, *args, **kwargs)
            return self._run(StepTask(core, f"{name}()", partial(core.owned.run, work)))

        return call

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averages into the model in the body; all ranks call; communicates at both ends."""
        average = self._core.owned.average
        with failing_together(self._core.group):
            self._core.refresh()
            average.check_swap_in()
        try:
            average.swap_in()  # now that no rank refuses
            self._core.gather_all()
            yield
        finally:
            average.swap_out()
            self._core.gather_all()

    def agree_on_infinity(self, found_inf: Tensor) -> None:
        """Set the scalers' ``found_inf`` if any rank saw an infinity; all ranks call; the CPU waits."""
        group = self._core.group
        with group.doing("GradScaler.unscale_()"):
            if group.size > 1:
                group.start_sum(found_inf).wait()

    def clip(self, arguments: ClipArguments) -> Tensor:
        """Clip all gradients by their global norm; all ranks call, except joined ones."""
        core = self._core
        try:
            if self.has_begun:
                raise RuntimeError(
                    "the step was taken during the backward pass, too early to clip: leave out "
                    "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
                )
            core.check_gradients()
            if self.joins.under_way:  # where gradients are whole
                self.joins.note_clip(str(arguments))
                return clip_alone(core.params, arguments)
        except (RuntimeError, ValueError, TypeError) as failure:
            if self.joins.under_way and self.joins.announce():
                exchange(core.group, Status.NOTHING, failure=failure)
            raise
        with core.group.doing("clip_grad_norm_()"):
            params, owners, slots = core.params, core.sharding.pieces, self._norm_slots
            if slots is None or not slots.are_of(params, owners):
                held = core.inputs.held  # these in chunks of the dimension that is cut
                pieces = [held[param].pieces if param in held else owners[param] for param in params]
                self._norm_slots = slots = NormSlots(params, owners, pieces, core.group)
            return clip_together(core.group, params, slots, arguments)

    def join_hook(self) -> JoinHook:
        """Return the ``Join`` hook that shadows the active ranks' steps."""
        if self._core.inputs.held:
            raise ValueError(
                "Join needs parameters that every rank has whole, and some are DTensors here: a rank without "
                "inputs would not take part in FSDP2's collectives either"
            )
        self.joins.join_hook()
        return ShadowHook(self.shadow)

    def shadow(self) -> None:
        """Take part in a step of the active ranks, on a rank without inputs."""
        group = self._core.group
        with self.joins.borrowing():
            if self.has_begun:  # by the comm hook: joined ranks run it too
                self.overlap().finish("", joined=True)
                return
            with group.doing(STEP_OF_JOIN):
                statuses = exchange(group, Status.JOINED)
            if ranks_that(statuses, Status.INFINITE):
                return
            self.joins.lend(group, statuses)
            self._step_rows(None, True)
