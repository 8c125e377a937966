"""How an optimizer steps: after or in the backward pass, beside joined ranks, scalers and mirrors."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.health.stamps import Call, Origins
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.options import Plain
from zero_optim.plan.pieces import Pieces
from zero_optim.state.core import Core
from zero_optim.step.amp import Scaling, drop_scale
from zero_optim.step.clip import ClipArguments, clip_together
from zero_optim.step.gradients import is_sparse
from zero_optim.step.join import JoinNotes, ShadowHook, lend_gradients, lend_to
from zero_optim.step.overlap import Overlap, OverlappedStep
from zero_optim.step.sparse_rows import check_sparse_rows
from zero_optim.step.unreduced import check_unreduced, unreduced_among
from zero_optim.step.words import Word, exchange, is_skipped_by_all, ranks_that

T = TypeVar("T")


class Stepping(Joinable):
    """Steps what a rank owns, then gathers. All ranks call its methods together.

    Args:
        core: the parts of the optimizer.
    """

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self._notes = JoinNotes()
        self._overlap: Overlap | None = None  # made when a hook first asks for it
        self._tell_replicas: Callable[[BaseException], None] | None = None

    # ------------------------------------------------------------------ a step

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None, kwargs: dict[str, Any]
    ) -> float | None:
        """Prepare, step what this rank owns, and gather; see `ZeroRedundancyOptimizer.step`."""
        core = self._core
        self._announce(steps=True)
        core.snapshot.steps += 1
        loss, left, failure = self._evaluate(closure)
        if self._finish_overlapped(optimizer, kwargs):
            return loss
        with self._telling_replicas():
            if self._is_skipped(optimizer, kwargs.pop("grad_scaler", None), failure):
                return loss
        core.group.phase.traffic.count_step()
        settle = None if left is None else left.settle
        result = self.run("step()", partial(core.owned.step, core.groups, left, **kwargs), settle)
        return loss if result is None else result

    def run(self, name: str, work: Callable[[], T], settle: Callable[[], None] | None = None) -> T:
        """Prepare, have the local optimizer change this rank's parameters, then gather.

        Args:
            name: of the call, such as ``step()``.
            work: changes the leaves, and the parameters with them.
            settle: called after it, also if it was not reached.
        """
        core = self._core
        core.check_attached()

        def gather(call: Call) -> None:
            with self._mirrored():
                core.sharding.gather(core.groups, call, frozen_too=core.owned.local.moves_frozen)

        with self._telling_replicas(), self._whatever_happens(name, gather):
            try:
                self._prepare()
                if not self.in_join:  # there the ranks have heard of it, see `_is_skipped`
                    self.check_sparse(self._sparse_cut_params())
                return work()
            finally:
                if settle is not None:
                    settle()

    @contextmanager
    def _whatever_happens(self, name: str, end: Callable[[Call], None]) -> Iterator[None]:
        """End a call when the body has ended, also where it raises: the other ranks wait for this one."""
        call = self._call(name)
        try:
            yield
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:
            end(call)
            del call  # has the error, whose traceback has this frame: together they would keep the group

    @contextmanager
    def _mirrored(self) -> Iterator[None]:
        """Mirror the state when the body has ended, also where it raises: on other ranks it may not."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error tells more
                self._core.mirror_state()
            raise
        self._core.mirror_state()

    def _prepare(self) -> None:
        """Get ready for a step: look at the parameters, and at what was changed from outside."""
        core = self._core
        core.check_weights()
        if core.is_mirrored and core.mirror.tells_of != core.snapshot.age:
            core.mirror_state()
        core.snapshot.changed()
        core.sharding.refresh(core.groups)
        core.check_cuts(core.groups)
        core.follow_state()

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
        in_join = self.in_join
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
        """Whether a closure may be left to the class's own step: leaves apart need its gradients before."""
        sharding = self._core.sharding
        if self._overlap is not None or self.in_join or sharding.has_cuts:
            return False
        if unreduced_among(sharding.pieces):  # gradients are compared before the step
            return False
        return self._core.owned.takes_closures

    # ------------------------------------------------------------------ what others are told

    def _call(self, name: str) -> Call:
        core = self._core
        return Call(name, lambda options: Origins(*core.owned.local.origins(options)), None)

    def tell_replicas_by(self, tell: Callable[[BaseException], None]) -> None:
        """Have the other replicas of a mesh told what all ranks of this one raise, as a step has failed.

        Args:
            tell: tells them; does not keep the optimizer.
        """
        self._tell_replicas = tell
        stamps = self._core.sharding.gathers.stamps
        if stamps is not None:
            stamps.tell = tell
            stamps.numbers = self._core.group.numbers

    @contextmanager
    def _telling_replicas(self) -> Iterator[None]:
        """Tell the other replicas of a mesh, if any, of an exception that all ranks of this one hear of."""
        try:
            yield
        except BaseException as error:
            if self._tell_replicas is not None:
                self._tell_replicas(error)
            raise

    def unit_stamps(self) -> UnitStamps:
        """Return the stamps that gathers of units send. No communication. Holds weak references only."""
        gathers, known = self._core.sharding.gathers, weakref.ref(self)

        def origins(options: Sequence[Mapping[str, Plain]]) -> Origins:
            stepping = known()
            return Origins((), ()) if stepping is None else stepping._call("").origins(options)

        def tell(error: Exception) -> None:
            stepping = known()
            if stepping is not None and stepping._tell_replicas is not None:
                stepping._tell_replicas(error)

        return UnitStamps(lambda: gathers.stamps, self._core.group, origins, tell)

    # ------------------------------------------------------------------ gradients

    def check_sparse(self, params: Iterable[Tensor]) -> None:
        """Refuse sparse gradients of cut parameters, unless trials of the class with such gave equal bits.

        To be called on all ranks, before a step with such gradients. Does not communicate. The first call
        tries the class, which takes some 10 ms.

        Args:
            params: those whose gradients are sparse; what is not cut, or not in the optimizer, is left out.
        """
        core = self._core
        concerned = [param for param in params if len(core.sharding.pieces.get(param, ())) > 1]
        if concerned:
            check_sparse_rows(core.groups, concerned, core.owned.local, core.owned.leaves.tried_dtype)

    def _sparse_cut_params(self) -> list[Tensor]:
        """List the cut parameters whose gradients are sparse, also where other ranks hold them."""
        return [param for param in self._core.sharding.cut_params() if is_sparse(param.grad)]

    def _check_unreduced(self) -> None:
        """Refuse to step with gradients that nobody has reduced; communicates only if there may be some."""
        group, unreduced = self._core.group, unreduced_among(self._core.sharding.pieces)
        if unreduced and group.size > 1:
            check_unreduced(group, unreduced, in_join=self.in_join)

    def _is_skipped(self, optimizer: Optimizer, scaler: object, failure: Exception | None) -> bool:
        """Tell whether the ranks skip a step; if they do not, gradients are as it needs them; all ranks call.

        Communicates only if a scaler is at work, or inside ``Join``: one collective of a byte. The CPU waits
        for that, once.

        Args:
            optimizer: of which scalers know.
            scaler: one that was given to ``step()``; None if there is none, or it has set attributes.
            failure: raised here already; inside ``Join`` alone, where the others hear of it.
        """
        core, in_join = self._core, self.in_join
        scaling = None
        if failure is None:
            try:
                self._check_unreduced()
                if in_join:
                    self.check_sparse(self._sparse_cut_params())
                scaling = Scaling.of(optimizer, scaler)
            except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
                failure = error
        if scaling is None and failure is None and not in_join:
            return False
        word = Word.NOTHING if scaling is None else scaling.word
        found_inf = None if scaling is None else scaling.found_inf
        words = exchange(core.group, word, found_inf=found_inf, failure=failure)
        if scaling is not None:
            if scaling.is_skipped(optimizer, words, core.group.rank):
                core.mirror.relabel(core.snapshot.steps)
                return True
            scaling.unscale(core.params)
        lend_to(core.group, ranks_that(words, Word.JOINED), *self._lendable(core.params))
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
            if self.in_join:
                self._announce(steps=False)
                words = exchange(group, Word.UNSCALES, found_inf=found_inf)
                found_inf.fill_(bool(ranks_that(words, Word.INFINITE)))
            elif group.size > 1:
                group.start_sum(found_inf)[1].wait()

    def clip(self, asked: ClipArguments) -> Tensor:
        """Clip all gradients by their global norm; all ranks call, but those that have joined."""
        if self._overlap is not None and self._overlap.current is not None:
            failure = RuntimeError(
                "the step was taken during the backward pass, too early to clip: leave out "
                "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
            )
            self._announce(steps=False)
            self.refuse_in_join(failure)
            raise failure
        core = self._core
        with core.group.doing("clip_grad_norm_()"):
            params, pieces, groups = self._lendable(core.params)
            if self.in_join:
                self._announce(steps=False)
                group = core.group.during("clip")
                words = exchange(group, Word.CLIPS)
                lend_to(group, ranks_that(words, Word.JOINED), params, pieces, groups, asked.to_send())
            return clip_together(core.group, params, pieces, asked, core.inputs.forms.files)

    def refuse_in_join(self, failure: Exception) -> None:
        """Raise on every rank of ``Join``, where those that joined wait for a step; all active ranks call.

        Does nothing where the optimizer is not given to ``Join``, or no ``Join`` is under way.
        """
        if self.in_join:
            exchange(self._core.group, Word.NOTHING, failure=failure)

    def _lendable(self, params: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Pieces], list[ParamGroup]]:
        core = self._core
        return params, [core.sharding.pieces[param] for param in params], core.groups

    # ------------------------------------------------------------------ in the backward pass

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

    def end_overlap(self, *, waits: bool) -> None:
        """Let go of what steps in the backward pass, if anything does; notes if that was half way."""
        core, overlap, self._overlap = self._core, self._overlap, None
        if overlap is not None and overlap.let_go(core.groups, waits=waits):
            core.snapshot.is_torn = core.snapshot.age > 0  # else it broke off before anything was stepped

    def let_go(self) -> None:
        """Forget the group, and those that were in ``Join`` with it."""
        self._tell_replicas = None
        # PyTorch leaves these as the last Join set them. Ranks that are new to the next group were in none.
        Joinable.__init__(self)
        self._notes = JoinNotes()

    def wait_for_gathers(self) -> None:
        """Wait for steps on another thread, then for all gathers."""
        if self._overlap is not None:
            self._overlap.wait_for_steps()
        self._core.sharding.under_way.wait()

    def begin_overlapped(self, *, joined: bool) -> None:
        """Begin a step during the backward pass; the hook that `zero_step` made calls it on all ranks.

        It calls where the backward pass calls it, as this moves parameters that the user replaced: see Note
        [Moving parameters] in `zero_optim.shard.storage`. Communicates inside ``Join`` only, on the process
        group of the gathers; there the CPU waits. Raises if the step before was not finished, or its backward
        pass broke off.

        Args:
            joined: this rank ran out of inputs: it is lent the options of the others.
        """
        core, overlap, lends = self._core, self.overlap(), self.in_join
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

        with self._whatever_happens("backward()", end):
            overlap.begin(joined=joined, lends=lends)
            has_begun = True
            self._prepare()

    def _heard(self, lane: RankGroup, call: Call) -> Exception | None:
        try:
            self._core.sharding.settle(lane.during("agree"), call, with_last=False)
        except (RemoteRankError, RankMismatchError) as error:
            return error
        return None

    def _finish_overlapped(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
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
        self._step_rest(overlap, late, joined=False)
        return True

    def _step_rest(self, overlap: Overlap, late: str, *, joined: bool) -> None:
        """Step what the backward pass did not reach, such as what DDP does not hold; all ranks call."""
        sharding = self._core.sharding
        with self._mirrored():
            overlap.wait_for_steps()  # on a rank that joined no backward pass has ended and done so
            lane = overlap.lanes.groups[0].during("agree")
            settle = partial(sharding.settle, lane, with_last=not sharding.gathers.readers)
            with self._whatever_happens("step()", settle), overlap.finishing() as current:
                self._step_late(overlap, current, late, joined=joined)

    def _step_late(self, overlap: Overlap, current: OverlappedStep, late: str, *, joined: bool) -> None:
        core, in_join = self._core, self.in_join
        rest = current.rest(core.groups)
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
                self.check_sparse([param for param in rest if is_sparse(param.grad)])
                self._check_unreduced()
            except (ValueError, RuntimeError) as error:
                failure = error
        if in_join:  # ranks that joined wait for this; if one rank fails all raise
            lend_gradients(core.group, joined, *self._lendable(rest), failure=failure)
        if rest:
            known = {param: None if failure is not None else param.grad for param in rest}
            overlap.step(core.groups, known, failure)
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_config(self) -> Any:  # noqa: ANN401 - a private type of PyTorch
        """What ``Join`` sets on the optimizer while it is under way."""
        return self._join_config

    @join_config.setter
    def join_config(self, config: Any) -> None:  # noqa: ANN401 - as above
        self._join_config = config

    @property
    def in_join(self) -> bool:
        """Whether a ``Join`` is under way, so that ranks may run out of inputs."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Give ``Join`` what shadows the steps."""
        self._notes.is_announced = False
        return ShadowHook(self.shadow)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` places its own small tensors."""
        return self._core.group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self._core.group.process_group

    def _announce(self, *, steps: bool) -> None:
        """Tell ``Join``, once in each iteration, that this rank has not run out of inputs.

        Communicates inside ``Join`` alone, and only if this is the first object there.

        Args:
            steps: the call that ends the iteration is ``step()``; a norm may be taken before it.
        """
        if not self._notes.is_announced:
            Join.notify_join_context(self)
        self._notes.is_announced = self.in_join and not steps

    def drop_after_shadow(self, params: Sequence[Tensor]) -> None:
        """Have the gradients that a shadowed backward pass gave dropped after the next `shadow`."""
        self._notes.given += params

    def shadow(self) -> None:
        """Take part in a step of the active ranks, after this one ran out of inputs."""
        core = self._core
        with self._notes.borrowing(core.params):
            if self._overlap is not None and self.is_begun:
                # The comm hook began the step: joined ranks run it too.
                self._step_rest(self._overlap, "", joined=True)
                return
            group, lendable = core.group, self._lendable(core.params)
            words = exchange(group, Word.JOINED)
            while ranks_that(words, Word.CLIPS) or ranks_that(words, Word.UNSCALES):
                if ranks_that(words, Word.CLIPS):
                    asked = lend_to(group.during("clip"), ranks_that(words, Word.JOINED), *lendable)
                    clip_together(group, *lendable[:2], ClipArguments.received(asked))
                words = exchange(group, Word.JOINED)
            if is_skipped_by_all(words):
                return
            lend_to(group, ranks_that(words, Word.JOINED), *lendable)
            group.phase.traffic.count_step()
            self.run("step()", partial(core.owned.step, core.groups, None))
