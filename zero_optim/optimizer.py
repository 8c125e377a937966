"""`ZeroRedundancyOptimizer`: any ``torch.optim`` optimizer, its state sharded over ranks."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall, raise_together, ranks_of
from zero_optim.comm.backends import held
from zero_optim.compat import private
from zero_optim.compat.kinship import make_known
from zero_optim.health.watchdog import OnStall
from zero_optim.plan.costs import Cost, CostName
from zero_optim.shard.claims import group_of_claim
from zero_optim.state.given import Params, ShardingOptions
from zero_optim.step.clip import ClipArguments
from zero_optim.step.join import JoinNotes
from zero_optim.step.spec import OptimizerSpec
from zero_optim.step.unreduced import unreduced_among
from zero_optim.stepping import SteppedOptimizer


class ZeroRedundancyOptimizer(SteppedOptimizer):
    """Shard the state of an optimizer over the ranks of a process group (ZeRO stage 1).

    Use it where ``optimizer_class(params, **defaults)`` stood. Every rank holds all parameters, and
    all gradients before `step`, which is DDP's way; each parameter's state lives on one rank, its
    owner, which steps it and broadcasts the result. Of a large parameter several ranks may own rows, see
    ``cuts``. The parameters after each step are, bit for
    bit, those of the unsharded optimizer, for every class whose step treats parameters one by one.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020. All ranks of the group must construct it, with the same arguments, and must call
    together: `step`, `add_param_group`, `consolidate_state_dict`, `load_state_dict`.

    ``isinstance`` takes it for ``torch.distributed.optim.ZeroRedundancyOptimizer``, which it replaces. With
    ``overlap_with_ddp=True`` that one does not train in its first two or three iterations, so scripts take
    some for warm-up. This one trains from the first: leave such iterations out, or their steps count.

    Args:
        params: parameters, dicts of groups, or (name, parameter) pairs, as ``torch.optim`` takes
            them; the same on every rank, in the same order. Any dtypes and shapes; dense. Names are compared.
            Without them, parameters alike are told apart by values, where ranks start with equal ones.
        optimizer_class: the class to shard, or a callable that builds one from groups. Ranks compare its
            code and arguments; what shall differ between ranks it finds out itself when it is called.
        process_group: ranks to shard over; None for the default group, or for the group of the fully sharded
            model that has the parameters.
        parameters_as_bucket_view: True moves the parameters into flat tensors, so that gathers land in place,
            and gives each a storage of its own there; False leaves ``param.data`` alone and copies at each
            step, as is also done for parameters in shared memory and on devices without DLPack.
        overlap_with_ddp: the step is taken during the backward pass, by a comm hook that `zero_optim.hooks`
            makes (``hook_with_zero_step``, ``zero_step``): the class is checked for that now, and `step`
            raises if no hook has run.
        bucket_cap_mb: capacity of a bucket in MiB, above 0. A step issues one broadcast for each bucket and
            owner; building needs one bucket of extra memory, and without views so does each gather.
        cost: what owning a parameter costs, so that ranks are given equal work: "numel" for steps
            that go element by element, "matmul" for those that orthogonalize matrices (Muon), or a
            function of the parameter. A group may name its own under the key "cost".
        master_dtype: step parameters of narrower floating-point dtypes through copies in this dtype,
            held by the owner alone: torch.float32 for bf16 and fp16 parameters. In the state they are entries
            named ``zero_optim.master``.
        ema_decay: keep an exponential moving average of the weights, each rank of what it owns, for
            `averaged_weights`; the factor by which it keeps its past at a step, below 1. In the state the
            averages are entries named ``zero_optim.ema``.
        gather_lazily: the model, whose forward passes wait for the gathers in the place of `step`, each
            module for its own parameters. So with clipping, the norm alone is waited for after backward.
            The method of this name says what else waits, and what must. Wrapped in DDP or not, by now or
            later; compile it later. A copy of the optimizer waits in `step`.
        assume_separable: take the class without trying it. Otherwise it is run on small tensors, whole and
            in parts, for some 10 to 60 ms the first time, and refused if the results differ.
        cuts: large parameters may be cut: several ranks own rows of one, so that every bucket is divided
            evenly. Only where trials of the class with these options gave the same bits, parameters and state
            (`pieces` and `explain` tell). False keeps every parameter whole, and chooses owners that are even
            over the whole model, but perhaps not in each bucket. What the CPU steps in half precision is
            never cut. A group may name its own under the key "cuts". If later options forbid cuts that were
            made, `step` and `load_state_dict` raise a ``ValueError`` on every rank, before anything changes.
            So does a step where the gradient of a cut parameter is sparse, unless the class gave the same
            bits with such: plain SGD does; SGD with momentum and Adagrad do not. Keep such a group whole.
        timeout: seconds that a wait of this optimizer may take. When one passes that, every rank of the group
            raises `StalledError`, which names the ranks that are missing and what they did last. A
            warning is logged after half of it. None for the process group's own timeout.
        on_stall: "exit" logs the error, and ends the process with exit code 75, in the place of raising:
            for jobs that a launcher starts again, and on NCCL, where a CPU that waits for the device cannot
            be made to raise.
        own_options: names of options of groups, such as ``("lr",)``, that each rank may set for itself after
            construction. All others are compared in each step, as far as they are plain values:
            if one differs, every rank raises `RankMismatchError`.
        mirror: what a rank owns (its rows of the parameters, their state, masters, averages) is copied to the
            next rank after every step, in CPU memory and over gloo, beside the next forward and backward
            pass. If a rank is lost, `rebind` on the others goes back to the end of the last step or the one
            before, without a file. Takes four times the memory of what a rank owns, and one small collective
            more a step; `explain` shows the bytes. A group of one rank has no other: it warns.
        **defaults: keyword arguments of ``optimizer_class``.

    A group may name its own ``optimizer_class``; its other options are then that class's arguments,
    and ``defaults`` do not apply to it: Muon for matrices and AdamW for the rest is one optimizer.

    Attributes:
        param_groups: all parameters with their options, the one truth for options.
        state: state of the parameters this rank owns, and of no others.
        defaults: as the class itself sets them.

    Raises:
        ValueError: on every rank, when arguments are wrong on any rank: no parameters, sparse ones, some
            that share memory, options the class refuses, a class whose step couples parameters.
        TypeError: likewise, for parameters or a class of the wrong kind.
        RankMismatchError: on every rank, when ranks were given different parameters or options.
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(  # noqa: PLR0913 - PyTorch's signature, and our options, which are keyword-only
        self,
        params: Params,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = True,
        overlap_with_ddp: bool = False,
        *,
        bucket_cap_mb: float = 32.0,
        cost: CostName | Cost = "numel",
        master_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        gather_lazily: torch.nn.Module | None = None,
        assume_separable: bool = False,
        cuts: bool = True,
        timeout: float | None = None,
        on_stall: OnStall = "raise",
        own_options: Sequence[str] = (),
        mirror: bool = False,
        **defaults: object,
    ) -> None:
        """Plan, agree on the plan with the other ranks, and build."""
        private.require("ZeroRedundancyOptimizer")
        Joinable.__init__(self)
        self._overlap, self._join_notes = None, JoinNotes()
        options = ShardingOptions(
            parameters_as_bucket_view=parameters_as_bucket_view,
            overlap_with_ddp=overlap_with_ddp,
            assume_separable=assume_separable,
            cuts=cuts,
            bucket_cap_mb=bucket_cap_mb,
            cost=cost,
            master_dtype=master_dtype,
            ema_decay=ema_decay,
            timeout=timeout,
            on_stall=on_stall,
            own_options=own_options,
            mirror=mirror,
        )
        params = held(params)
        if process_group is None:
            process_group = group_of_claim(params)
        default, group = OptimizerSpec(optimizer_class, defaults), ranks_of(process_group)
        super().__init__(params, default, group, options, gather_lazily)
        if overlap_with_ddp:
            self.overlap()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the hooks, as ``torch.optim`` does; does not communicate."""
        # An overlap has process groups of its own; a copy makes others when it is registered as a hook.
        own = {"_join_config": self._join_config, "_join_notes": JoinNotes(), "_overlap": None}
        return {**super().__getstate__(), **own}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        """Reach what the user's class adds, such as ``train()`` and ``eval()`` of schedule-free ones.

        All ranks call such a method; the parameters are gathered after it.
        """
        if name in ("_overlap_with_ddp", "_overlap_info"):
            raise AttributeError(
                "PyTorch's hook_with_zero_step and hook_with_zero_step_interleaved step PyTorch's "
                "ZeroRedundancyOptimizer alone: for this one import them from zero_optim.hooks, not from "
                "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
            )
        owned = vars(self).get("_owned")  # none in a copy that is being made
        found = [] if owned is None or name.startswith("_") else owned.local.find(name)
        if not found:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if not inspect.ismethod(found[0]):
            return found[0]
        return partial(self._run, f"{name}()", self._owned.local.call, self.param_groups, found)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the format of ``torch.optim``; does not communicate.

        Before any step it works on every rank. After a step it works on the ranks to which
        `consolidate_state_dict` brought the state, until the next step. Options are the current ones. The
        dict loads into the plain optimizer, and into this one with any world size. Two calls share tensors,
        which are never written to.

        Raises:
            NotConsolidatedError: the state is not on this rank, or a step was made after it was consolidated.
        """
        # Not in a base class: trainers that call super(ZeroRedundancyOptimizer, optimizer).state_dict() want
        # what torch.optim says of `state`, the part of this rank.
        return self._whole_state_dict()

    # ------------------------------------------------------------------ stepping

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a ``GradScaler`` calls `step` after an infinity too; see Note [Infinities] in `step.amp`.

        Only inside ``Join``, and where a step was begun in the backward pass, which raises. Otherwise the
        question is counted: Note [What a count cannot tell] in `zero_optim.health.stamps`.
        """
        if self._join_config.enable or (self._overlap is not None and self._overlap.current is not None):
            return True
        stamps = self._sharding.gathers.stamps
        if stamps is not None:
            stamps.asked += 1
        return False

    def step(self, closure: Callable[[], float] | None = None, **kwargs: object) -> float | None:  # type: ignore[override]
        """Step what this rank owns, then bring every parameter up to date; all ranks call.

        Communicates: one broadcast for each bucket and owner. Every rank has its new parameters when the call
        returns; on CUDA with NCCL the current stream waits for them, not the CPU. With `gather_lazily` the
        modules wait instead. A rank on which the class's own step raises takes part in that all the same, so
        that the others do not wait for it. They hear of it in what it sends, and raise too.

        Args:
            closure: evaluates the model and returns the loss, as in ``torch.optim``; given on all ranks or on
                none. One more collective of a byte: if it raises on a rank, all raise before anything has
                been stepped. But a rank that waits in its own closure, in the all-reduce of a backward pass
                that the other one did not reach, cannot hear of it before the group's timeout. Inside
                ``Join`` with an overlapped step ranks do not hear of it.
            **kwargs: handed on to the class's own ``step``. ``grad_scaler``, which some scalers hand in, is
                asked what it found, and not handed on.

        Returns:
            The loss that ``closure`` gave, None without one.

        Raises:
            TypeError: ``closure`` cannot be called.
            ValueError: on every rank with such a gradient, before anything is stepped: the gradient of a cut
                parameter is sparse, and the class does not bear that, see ``cuts``.
            RankMismatchError: on every rank, options of groups differ between ranks, see ``own_options``, or
                ranks are in different calls. The step was taken, and parameters are equal on all ranks.
                Or, before anything is stepped: a parameter was frozen when `zero_optim.ddp` wrapped the
                model, trains now, and its gradients differ between ranks; inside ``Join`` a RuntimeError.
            Exception: on every rank, what the class's own step raises on any, such as for a wrong keyword.
                If it raises on some ranks only, the others have stepped what they own: parameters are equal
                on all ranks, but only some of them have taken the step.
        """
        if self.leaves_out_step():
            return None
        with self._group.doing("step()"):
            return self._step(closure, kwargs)

    def _step(self, closure: Callable[[], float] | None, kwargs: dict[str, Any]) -> float | None:
        self.announce_to_join(steps=True)
        self.num_steps += 1
        loss: float | None = None
        failure: Exception | None = None
        shared = None if closure is None else SharedCall(self._group, closure)
        if closure is not None and shared is not None and not self._leaves_closure:
            try:
                with torch.enable_grad():  # the gradients are needed before the class's own step begins
                    # Inside Join the others hear of it in the exchange that every step there begins with.
                    loss, shared = closure() if self._join_config.enable else shared(), None
            except Exception as error:
                if not self._join_config.enable or self._overlap is not None:
                    raise
                failure, shared = error, None
        if self._overlap is not None and self._finish_overlapped(self._overlap, kwargs):
            return loss
        with self.telling_replicas():
            if self.is_skipped_together(kwargs.pop("grad_scaler", None), failure):
                return loss
        self._group.phase.traffic.count_step()
        if shared is not None:
            return self._step_with(shared, kwargs)
        stepped: float | None = self._run("step()", self._owned.local.step, self.param_groups, None, **kwargs)
        return loss if stepped is None else stepped

    def _step_with(self, closure: SharedCall, kwargs: dict[str, Any]) -> float | None:
        """Leave a closure to the class's own step, then gather; the ranks hear of each other in between."""
        with self.telling_replicas():
            return self._run_with(closure, kwargs)

    def _run_with(self, closure: SharedCall, kwargs: dict[str, Any]) -> float | None:
        call = self._call("step()")
        try:
            try:
                self.begin_step()
                loss: float | None = self._owned.run(
                    self._owned.local.step, self.param_groups, closure, **kwargs
                )
            finally:
                closure.settle()
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:
            with self.mirrored():
                self._sharding.gather(self.param_groups, call)
            del call  # has the error, whose traceback has this frame
        return loss

    @property
    def _leaves_closure(self) -> bool:
        """Whether a closure may be left to the class's own step: leaves apart need its gradients before."""
        if self._overlap is not None or self._join_config.enable or self._sharding.has_cuts:
            return False
        if unreduced_among(self._sharding.pieces):  # gradients are compared before the step
            return False
        return self._owned.takes_closures

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients down so that their global norm is at most ``max_norm``; all ranks call.

        ``torch.nn.utils.clip_grad_norm_`` with the owners' gradients: the norm is the same on every
        rank, and each is taken once, by its owner. Where gradients are sharded, the norm of a parameter that
        is cut is combined from those of its rows, and may differ from PyTorch's in the last bits. One small
        collective; the CPU waits for it and for the gradients. If parameters are on an accelerator and the
        group has a backend for the CPU beside that of the device, two: the CPU waits for other ranks to call,
        and for no gradient. With ``error_if_nonfinite`` it waits for the norm. Inside ``Join`` the norm is
        that of the ranks that have inputs left, all of which must clip; one more collective of a byte.

        Args:
            max_norm: the norm wanted at most.
            norm_type: order of the norm, ``inf`` included.
            error_if_nonfinite: raise, on every rank, if the norm is not finite.
            foreach: as in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, 0-d.

        Raises:
            RuntimeError: on every rank, the norm is not finite and ``error_if_nonfinite``.
            RankMismatchError: likewise, ranks gave different arguments.
            TypeError: likewise, an argument is of the wrong kind on any; or ValueError. Nothing is scaled
                after any of these.
        """
        if self._overlap is not None and self._overlap.current is not None:
            failure = RuntimeError(
                "the step was taken during the backward pass, too early to clip: leave out "
                "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
            )
            self.announce_to_join(steps=False)
            self.refuse_in_join(failure)
            raise failure
        with self._group.doing("clip_grad_norm_()"):
            return self.clip_together(ClipArguments(max_norm, norm_type, error_if_nonfinite, foreach))


make_known(ZeroRedundancyOptimizer)


def require_ours(optimizer: object) -> None:
    """Refuse what is not sharded by this library; all ranks call. Communicates only to fail together.

    Raises:
        TypeError: on every rank, if it is something else there.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        kind = type(optimizer).__name__
        raise_together(TypeError(f"expected a zero_optim.ZeroRedundancyOptimizer, got {kind}"))
