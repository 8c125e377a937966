"""How an optimizer steps whose parameters have owners: after or in the backward pass, beside joined ranks."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.health.stamps import Call, Origins
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.options import Plain
from zero_optim.plan.pieces import Pieces
from zero_optim.state.unit_rows import UnitRowsOptimizer
from zero_optim.step.amp import Scaling, drop_scale
from zero_optim.step.clip import ClipArguments, clip_together
from zero_optim.step.gradients import is_sparse
from zero_optim.step.join import JoinNotes, lend_gradients, lend_to
from zero_optim.step.overlap import Overlap, OverlappedStep
from zero_optim.step.sparse_rows import check_sparse_rows
from zero_optim.step.unreduced import check_unreduced, unreduced_among
from zero_optim.step.words import Word, exchange, is_skipped_by_all, ranks_that


class SteppedOptimizer(UnitRowsOptimizer, Joinable):
    """The parts of a step; the subclass puts them together for its users.

    All ranks call its methods together.
    """

    _overlap: Overlap | None  # made when a hook first asks for it
    _join_notes: JoinNotes
    _tell_replicas: Callable[[BaseException], None] | None = None

    # ------------------------------------------------------------------ a step

    def _run(self, name: str, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Let the local optimizer change this rank's parameters, then gather.

        Args:
            name: of the call, such as ``step()``.
            work: changes them.
            *args: for ``work``.
            **kwargs: for ``work``.
        """
        with self.telling_replicas():
            return self._run_and_gather(name, work, *args, **kwargs)

    def tell_replicas_by(self, tell: Callable[[BaseException], None]) -> None:
        """Have the other replicas of a mesh told what all ranks of this one raise, as a step has failed.

        Args:
            tell: tells them; does not keep the optimizer.
        """
        self._tell_replicas = tell
        if self._sharding.gathers.stamps is not None:
            self._sharding.gathers.stamps.tell = tell
            self._sharding.gathers.stamps.numbers = self._group.numbers

    @contextmanager
    def telling_replicas(self) -> Iterator[None]:
        """Tell the other replicas of a mesh, if any, of an exception that all ranks of this one hear of."""
        try:
            yield
        except BaseException as error:
            if self._tell_replicas is not None:
                self._tell_replicas(error)
            raise

    def _run_and_gather(self, name: str, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        self.check_attached()
        call = self._call(name)
        try:
            self.begin_step()
            if not self._join_config.enable:  # there the ranks have heard of it, see `is_skipped_together`
                self.check_sparse(self._params_of_sparse())
            result = self._owned.run(work, *args, **kwargs)
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:  # the others wait for this rank
            with self.mirrored():
                self._sharding.gather(self.param_groups, call, frozen_too=self._owned.local.moves_frozen)
            del call  # has the error, whose traceback has this frame: together they would keep the group
        return result

    def _call(self, name: str, failure: BaseException | None = None) -> Call:
        return Call(name, lambda options: Origins(*self._owned.local.origins(options)), failure)

    def unit_stamps(self) -> UnitStamps:
        """Give what the gathers of units tell of steps; does not communicate, nor keep the optimizer."""
        gathers, found = self._sharding.gathers, weakref.ref(self)

        def origins(options: Sequence[Mapping[str, Plain]]) -> Origins:
            optimizer = found()
            return Origins((), ()) if optimizer is None else optimizer._call("").origins(options)

        def told(error: Exception) -> None:
            optimizer = found()
            if optimizer is not None and optimizer._tell_replicas is not None:
                optimizer._tell_replicas(error)

        return UnitStamps(lambda: gathers.stamps, self._group, origins, told)

    def begin_step(self) -> None:
        """Get ready for a step: look at the parameters, and at what was changed from outside."""
        self.check_weights()
        self.mirror_if_due()
        self._snapshot.changed()
        self._sharding.refresh(self.param_groups)
        self.check_cuts(self.param_groups)
        self._follow_state()

    def check_sparse(self, params: Iterable[Tensor]) -> None:
        """Refuse sparse gradients of cut parameters, unless trials of the class with such gave equal bits.

        To be called on all ranks, before a step with such gradients. Does not communicate. The first call
        tries the class, which takes some 10 ms.

        Args:
            params: those whose gradients are sparse; what is not cut, or not in the optimizer, is left out.

        Raises:
            ValueError: names a parameter, and says what to do.
        """
        pieces = self._sharding.pieces
        concerned = [param for param in params if len(pieces.get(param, ())) > 1]
        if concerned:
            dtype_of = self._owned.leaves.tried_dtype
            check_sparse_rows(self.param_groups, concerned, self._owned.local, dtype_of)

    def _params_of_sparse(self) -> list[Tensor]:
        """List the cut parameters whose gradients are sparse, also where other ranks hold them."""
        return [param for param in self._sharding.cut_params() if is_sparse(param.grad)]

    def _failure_of_rest(self, params: Iterable[Tensor]) -> Exception | None:
        try:
            self.check_sparse([param for param in params if is_sparse(param.grad)])
            self._check_unreduced()
        except (ValueError, RuntimeError) as error:
            return error
        return None

    def _check_unreduced(self) -> None:
        """Refuse to step with gradients that nobody has reduced; communicates only if there may be some."""
        unreduced = unreduced_among(self._sharding.pieces)
        if unreduced and self._group.size > 1:
            check_unreduced(self._group, unreduced, in_join=self._join_config.enable)

    def is_skipped_together(self, scaler: object, failure: Exception | None) -> bool:
        """Tell whether the ranks skip a step; if they do not, gradients are as it needs them; all ranks call.

        Communicates only if a scaler is at work, or inside ``Join``: one collective of a byte. The CPU waits
        for that, once.

        Args:
            scaler: one that was given to ``step()``; None if there is none, or it has set attributes.
            failure: raised here already; inside ``Join`` alone, where the others hear of it.

        Raises:
            Exception: on every rank, a failure of any, such as that of a scaler that scaled nothing there.
            TypeError: ``scaler`` is no ``torch.amp.GradScaler``: on every rank, if all were given one.
        """
        scaling = None
        if failure is None:
            try:
                self._check_unreduced()
                if self._join_config.enable:
                    self.check_sparse(self._params_of_sparse())
                scaling = Scaling.of(self, scaler)
            except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
                failure = error
        if scaling is None and failure is None and not self._join_config.enable:
            return False
        word = Word.NOTHING if scaling is None else scaling.word
        found_inf = None if scaling is None else scaling.found_inf
        words = exchange(self._group, word, found_inf=found_inf, failure=failure)
        if scaling is not None:
            if scaling.is_skipped(self, words, self._group.rank):
                self._mirror.relabel(self.num_steps)
                return True
            scaling.unscale(self._params())
        lend_to(self._group, ranks_that(words, Word.JOINED), *self._lendable(self._params()))
        return False

    def agree_on_infinity(self, found_inf: Tensor) -> None:
        """Tell all scalers what any has found in gradients that are sharded; all ranks call as these look.

        One collective of 4 bytes; the CPU waits as for a sum of gradients. Inside ``Join`` it is one of a
        byte, and the CPU waits for it.

        Args:
            found_inf: 0-d or of one element, above zero on a rank that found one; afterwards on all ranks.
        """
        with self._group.doing("GradScaler.unscale_()"):
            if self._join_config.enable:
                self.announce_to_join(steps=False)
                words = exchange(self._group, Word.UNSCALES, found_inf=found_inf)
                found_inf.fill_(bool(ranks_that(words, Word.INFINITE)))
            elif self._group.size > 1:
                self._group.start_sum(found_inf)[1].wait()

    def clip_together(self, asked: ClipArguments) -> Tensor:
        """Clip all gradients by their global norm; all ranks call, but those that have joined.

        Inside ``Join`` one collective of a byte comes first, and those ranks are lent what they need.
        """
        params, pieces, groups = self._lendable(self._params())
        if self._join_config.enable:
            self.announce_to_join(steps=False)
            group = self._group.during("clip")
            words = exchange(group, Word.CLIPS)
            lend_to(group, ranks_that(words, Word.JOINED), params, pieces, groups, asked.to_send())
        return clip_together(self._group, params, pieces, asked, self.keeping)

    def refuse_in_join(self, failure: Exception) -> None:
        """Raise on every rank of ``Join``, where those that joined wait for a step; all active ranks call.

        Does nothing where the optimizer is not given to ``Join``, or no ``Join`` is under way.

        Args:
            failure: what is wrong, for every active rank.
        """
        if self._join_config.enable:
            exchange(self._group, Word.NOTHING, failure=failure)

    def _lendable(self, params: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Pieces], list[ParamGroup]]:
        return params, [self._sharding.pieces[param] for param in params], self.param_groups

    # ------------------------------------------------------------------ in the backward pass

    def begin_overlapped_step(self, *, joined: bool) -> None:
        """Begin a step during the backward pass; the hook that `zero_step` made calls it on all ranks.

        It calls where the backward pass calls it, as this moves parameters that the user replaced: see Note
        [Moving parameters] in `zero_optim.shard.storage`. Communicates inside ``Join`` only, on the process
        group of the gathers; there the CPU waits.

        Args:
            joined: this rank ran out of inputs: it is lent the options of the others.

        Raises:
            RuntimeError: the step before was not finished, or its backward pass broke off.
        """
        self._group.phase.traffic.count_step()
        self._opt_called = True  # for schedulers, which warn if it is step() that never was
        overlap, lends = self.overlap(), self._join_config.enable
        call, lane, has_begun = self._call("backward()"), overlap.lanes.groups[0], False
        try:
            overlap.begin(joined=joined, lends=lends)
            has_begun = True
            self.begin_step()
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:
            if lends:
                lend_gradients(lane, joined, [], [], self.param_groups)
            if has_begun:  # else gathers may be under way to parameters that this pass has read
                self._sharding.begin_call(self.param_groups, call)
                # Now that the gathers of the pass before are over. What they tell is raised when this pass
                # has ended: the other ranks reduce its buckets, and wait for this one.
                current = overlap.current
                assert current is not None  # it has begun
                current.told = self._heard(lane, call)
            del call  # see `_run`

    def _heard(self, lane: RankGroup, call: Call) -> Exception | None:
        try:
            self._sharding.settle(lane.during("agree"), call, with_last=False)
        except (RemoteRankError, RankMismatchError) as error:
            return error
        return None

    def overlap(self) -> Overlap:
        """Give what steps some parameters during the backward pass; a hook of `zero_optim.hooks` calls it.

        All ranks call; the first call makes process groups.

        Raises:
            ValueError: on every rank, when a class cannot be stepped in parts.
        """
        if self._overlap is None:
            with failing_together(self._group):
                self._owned.local.check_parts()
            self._overlap = Overlap(self._group, self._sharding, self._owned)
        return self._overlap

    def _end_overlap(self, *, waits: bool) -> None:
        overlap, self._overlap = self._overlap, None
        if overlap is not None and overlap.let_go(self.param_groups, waits=waits):
            self._snapshot.is_torn = self._snapshot.age > 0  # else it broke off before anything was stepped

    def _let_go(self, *, waits: bool) -> None:
        super()._let_go(waits=waits)
        self._tell_replicas = None
        # PyTorch leaves these as the last Join set them. Ranks that are new to the next group were in none.
        Joinable.__init__(self)
        self._join_notes = JoinNotes()

    def _bound(self) -> None:
        super()._bound()
        if self.overlaps_with_ddp:
            self.overlap()

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; returns at once if nothing is under way.

        On CUDA with NCCL the current stream waits, not the CPU.

        To be called when ``backward()`` has raised and training goes on all the same: part of the
        step may have been taken.
        """
        if self._overlap is not None:
            self._overlap.wait_for_steps()
        super().wait_for_gathers()

    def _finish_overlapped(self, overlap: Overlap, kwargs: dict[str, Any]) -> bool:
        """Finish a step that was begun during the backward pass; False if none was."""
        if overlap.current is None:
            if self._options.overlap_with_ddp:
                raise RuntimeError(
                    "overlap_with_ddp=True, but no step was taken during the backward pass: register the "
                    "hook, ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, "
                    "optimizer)), and run backward() outside no_sync() before step()"
                )
            return False
        late = ", ".join(kwargs)
        if drop_scale(self):
            late = late or "GradScaler, whose factor was not taken out of the gradients"
        self._step_rest(overlap, late, joined=False)
        return True

    def _step_rest(self, overlap: Overlap, late: str, *, joined: bool) -> None:
        """Step what the backward pass did not reach, such as what DDP does not hold; all ranks call."""
        with self.mirrored():
            self._step_what_is_left(overlap, late, joined=joined)

    def _step_what_is_left(self, overlap: Overlap, late: str, *, joined: bool) -> None:
        overlap.wait_for_steps()  # on a rank that joined no backward pass has ended and done so
        lane, call = overlap.lanes.groups[0].during("agree"), self._call("step()")
        try:
            with overlap.finishing() as current:
                self._step_late(overlap, current, late, joined=joined)
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:
            self._sharding.settle(lane, call, with_last=not self._sharding.gathers.readers)
            del call  # see `_run`

    def _step_late(self, overlap: Overlap, current: OverlappedStep, late: str, *, joined: bool) -> None:
        rest = current.rest(self.param_groups)
        failure: Exception | None = None
        try:
            if not joined:
                current.check_asked(late)
        except RuntimeError as error:
            if not self._join_config.enable:
                raise
            failure = error
        if failure is None and not joined:
            failure = self._failure_of_rest(rest)
        if self._join_config.enable:  # ranks that joined wait for this; if one rank fails all raise
            lend_gradients(self._group, joined, *self._lendable(rest), failure=failure)
        if rest:
            known = {param: None if failure is not None else param.grad for param in rest}
            overlap.step(self.param_groups, known, failure)
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Give ``torch.distributed.algorithms.Join`` what shadows this optimizer's steps.

        Works beside DDP: ``with Join([ddp_model, optimizer]):``. Ranks still active must step once
        in each iteration. Takes no options of its own.
        """
        self._join_notes.is_announced = False
        return _ShadowHook(self.shadow_step)

    def announce_to_join(self, *, steps: bool) -> None:
        """Tell ``Join``, once in each iteration, that this rank has not run out of inputs.

        Communicates inside ``Join`` alone, and only if this is the first object there.

        Args:
            steps: the call that ends the iteration is ``step()``; a norm may be taken before it.
        """
        notes = self._join_notes
        if not notes.is_announced:
            Join.notify_join_context(self)
        notes.is_announced = self._join_config.enable and not steps

    def drop_after_shadow(self, params: Sequence[Tensor]) -> None:
        """Have the gradients of some parameters dropped after the next `shadow_step`; does not communicate.

        Args:
            params: this rank has run out of inputs, and was given these gradients by a backward pass of the
                others.
        """
        self._join_notes.given += params

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` places its own small tensors."""
        return self._group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self._group.process_group

    def shadow_step(self) -> None:
        """Take part in a step of the active ranks, after this one ran out of inputs."""
        with self._join_notes.borrowing(self._params()):
            overlap = self._overlap
            if overlap is not None and overlap.current is not None:
                # The comm hook began the step: joined ranks run it too.
                self._step_rest(overlap, "", joined=True)
            else:
                self._shadow_plain_step()

    def _shadow_plain_step(self) -> None:
        lendable = self._lendable(self._params())
        words = exchange(self._group, Word.JOINED)
        while ranks_that(words, Word.CLIPS) or ranks_that(words, Word.UNSCALES):
            if ranks_that(words, Word.CLIPS):
                group = self._group.during("clip")
                asked = lend_to(group, ranks_that(words, Word.JOINED), *lendable)
                clip_together(self._group, *lendable[:2], ClipArguments.received(asked))
            words = exchange(self._group, Word.JOINED)
        if is_skipped_by_all(words):
            return
        lend_to(self._group, ranks_that(words, Word.JOINED), *lendable)
        self._group.phase.traffic.count_step()
        self._run("step()", self._owned.local.step, self.param_groups, None)


class _ShadowHook(JoinHook):
    """Answers each step of the active ranks, which must step once an iteration.

    Args:
        shadow: takes part in one step.
    """

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Shadow one iteration; ``Join`` calls it while some rank is still active."""
        self._shadow()
