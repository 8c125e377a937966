"""`ZeroRedundancyOptimizer`: any ``torch.optim`` optimizer, its state sharded over ranks."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import SharedCall, failing_together
from zero_optim.comm.arguments import ranks_of
from zero_optim.compat.kinship import make_known
from zero_optim.plan.costs import Cost, CostName
from zero_optim.state.sharded import Params, ShardingOptions
from zero_optim.state.state_dicts import ShardedStateDicts
from zero_optim.step.amp import drop_scale, skips_together
from zero_optim.step.clip import ClipArguments, clip_together
from zero_optim.step.join import lend_gradients
from zero_optim.step.overlap import Overlap
from zero_optim.step.spec import OptimizerSpec


class ZeroRedundancyOptimizer(ShardedStateDicts, Joinable):
    """Shard the state of an optimizer over the ranks of a process group (ZeRO stage 1).

    Use it where ``optimizer_class(params, **defaults)`` stood. Every rank holds all parameters, and
    all gradients before `step`, which is DDP's way; each parameter's state lives on one rank, its
    owner, which steps it and broadcasts the result. The parameters after each step are, bit for
    bit, those of the unsharded optimizer, for every class whose step treats parameters one by one.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020. All ranks of the group must construct it, with the same arguments, and must call
    together: `step`, `add_param_group`, `consolidate_state_dict`, `load_state_dict`.

    ``isinstance`` takes it for ``torch.distributed.optim.ZeroRedundancyOptimizer``, which it replaces. With
    ``overlap_with_ddp=True`` that one does not train in its first two or three iterations, so scripts take
    some for warm-up. This one trains from the first: leave such iterations out, or their steps count.

    Args:
        params: parameters, dicts of groups, or (name, parameter) pairs, as ``torch.optim`` takes
            them; the same on every rank. Any dtypes and shapes; dense.
        optimizer_class: the class to shard, or a callable that builds one from groups. Ranks compare its
            code and arguments; what shall differ between ranks it finds out itself when it is called.
        process_group: ranks to shard over; None for the default group.
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
            held by the owner alone: torch.float32 for bf16 and fp16 parameters.
        ema_decay: keep an exponential moving average of the weights, each rank of what it owns, for
            `averaged_weights`; the factor by which it keeps its past at a step, below 1.
        assume_separable: take the class without trying it. Otherwise it is run on small tensors, whole and
            in parts, for some 10 to 60 ms the first time, and refused if the results differ.
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

    # What torch.amp.GradScaler asks for; it sets grad_scale and found_inf around a step. See step.amp.
    _step_supports_amp_scaling = True

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
        assume_separable: bool = False,
        **defaults: object,
    ) -> None:
        """Plan, agree on the plan with the other ranks, and build."""
        Joinable.__init__(self)
        self._overlap: Overlap | None = None  # made when a hook first asks for it
        options = ShardingOptions(
            parameters_as_bucket_view=parameters_as_bucket_view,
            overlap_with_ddp=overlap_with_ddp,
            assume_separable=assume_separable,
            bucket_cap_mb=bucket_cap_mb,
            cost=cost,
            master_dtype=master_dtype,
            ema_decay=ema_decay,
        )
        super().__init__(params, OptimizerSpec(optimizer_class, defaults), ranks_of(process_group), options)
        if overlap_with_ddp:
            self.overlap()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the hooks, as ``torch.optim`` does; does not communicate."""
        # An overlap has process groups of its own; a copy makes others when it is registered as a hook.
        return {**super().__getstate__(), "_join_config": self._join_config, "_overlap": None}

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
        return partial(self._run, self._owned.local.call, self.param_groups, found)

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: object) -> float | None:  # type: ignore[override]
        """Step what this rank owns, then bring every parameter up to date; all ranks call.

        Communicates: one broadcast for each bucket and owner. Every rank has its new parameters when
        the call returns (on CUDA, when the current stream gets there). A rank on which the class's
        own step raises takes part in that all the same, so that the others do not wait for it.

        Args:
            closure: evaluates the model and returns the loss, as in ``torch.optim``; given on all ranks or on
                none. One more collective of a byte: if it raises on a rank, all raise before anything has
                been stepped. But a rank that waits in its own closure, in the all-reduce of a backward pass
                that the other one did not reach, cannot hear of it before the group's timeout. Inside
                ``Join`` ranks do not hear of it.
            **kwargs: handed on to the class's own ``step``. ``grad_scaler``, which some scalers hand in, is
                asked what it found, and not handed on.

        Returns:
            The loss that ``closure`` gave, None without one.

        Raises:
            TypeError: ``closure`` cannot be called.
        """
        if self.leaves_out_step():
            return None
        Join.notify_join_context(self)
        loss: float | None = None
        shared = None if closure is None else SharedCall(self._group, closure)
        if closure is not None and shared is not None and not self._leaves_closure:
            with torch.enable_grad():  # the gradients are needed before the class's own step begins
                # Ranks that have joined have no closure to tell of.
                loss, shared = closure() if self._join_config.enable else shared(), None
        if self._overlap is not None and self._finish_overlapped(self._overlap, kwargs):
            return loss
        if skips_together(self._group, self, kwargs.pop("grad_scaler", None), self._params()):
            return loss
        self.lend(self._params(), joined=False)
        if shared is not None:
            return self._step_with(shared, kwargs)
        stepped: float | None = self._run(self._owned.local.step, self.param_groups, None, **kwargs)
        return loss if stepped is None else stepped

    def _step_with(self, closure: SharedCall, kwargs: dict[str, Any]) -> float | None:
        """Leave a closure to the class's own step, then gather; the ranks hear of each other in between."""
        try:
            try:
                self.begin_step()
                loss: float | None = self._owned.run(
                    self._owned.local.step, self.param_groups, closure, **kwargs
                )
            finally:
                closure.settle()
        finally:
            self._sharding.gather(self.param_groups)
        return loss

    @property
    def _leaves_closure(self) -> bool:
        """Whether a closure may be left to the class's own step."""
        return self._overlap is None and not self._join_config.enable and self._owned.takes_closures

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
        with overlap.finishing(late, joined=joined) as current:
            rest = current.rest(self.param_groups)
            if rest:
                self.lend(rest, joined=joined)
                overlap.step(self.param_groups, overlap.part(rest), [param.grad for param in rest])

    def _run(self, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Let the local optimizer change this rank's parameters, then gather."""
        try:
            self.begin_step()
            result = self._owned.run(work, *args, **kwargs)
        finally:
            self._sharding.gather(self.param_groups, frozen_too=self._owned.local.moves_frozen)
        return result

    def begin_step(self) -> None:
        """Get ready for a step: look at the parameters, and at what was changed from outside."""
        self.check_weights()
        self._snapshot.changed()
        self._sharding.refresh(self.param_groups)
        self._owned.take_over_state(self.state)

    def begin_overlapped_step(self, *, joined: bool) -> None:
        """Begin a step during the backward pass; the hook that `zero_step` made calls it on all ranks.

        It calls on the thread of the backward pass, as this moves parameters that the user replaced.
        Communicates inside ``Join`` only, on a process group of the overlap.

        Args:
            joined: this rank ran out of inputs: it is lent the options of the others.

        Raises:
            RuntimeError: the step before was not finished, or its backward pass broke off.
        """
        self._opt_called = True  # for schedulers, which warn if it is step() that never was
        overlap, lends = self.overlap(), self._join_config.enable
        try:
            overlap.begin(joined=joined, lends=lends)
            self.begin_step()
        finally:
            if lends:
                lend_gradients(overlap.lanes.groups[0], joined, [], [], self.param_groups)

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

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; free if nothing is under way.

        To be called when ``backward()`` has raised and training goes on all the same: part of the
        step may have been taken.
        """
        if self._overlap is not None:
            self._overlap.wait_for_steps()
        super().wait_for_gathers()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients down so that their global norm is at most ``max_norm``; all ranks call.

        ``torch.nn.utils.clip_grad_norm_`` with the owners' gradients: the norm is the same on every
        rank, and each is taken once, by its owner. One small collective; on CUDA the CPU waits for it, once.

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
            raise RuntimeError(
                "the step was taken during the backward pass, too early to clip: leave out "
                "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
            )
        params = self._params()
        owners = [self._sharding.owners[param] for param in params]
        asked = ClipArguments(max_norm, norm_type, error_if_nonfinite, foreach)
        return clip_together(self._group, params, owners, asked)

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Give ``torch.distributed.algorithms.Join`` what shadows this optimizer's steps.

        Works beside DDP: ``with Join([ddp_model, optimizer]):``. Ranks still active must step once
        in each iteration. Takes no options of its own.
        """
        return _ShadowHook(self)

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
        overlap = self._overlap
        if overlap is not None and overlap.current is not None:
            # The comm hook began the step: joined ranks run it too.
            self._step_rest(overlap, "", joined=True)
            return
        self.lend(self._params(), joined=True)
        self._run(self._owned.local.step, self.param_groups, None)

    def lend(self, params: Sequence[Tensor], *, joined: bool) -> None:
        """Give ranks that ran out of inputs the gradients of what they own; all ranks call.

        Communicates inside ``Join`` only.

        Args:
            params: some parameters, the same on every rank.
            joined: this rank is one of those.
        """
        if self._join_config.enable:
            owners = [self._sharding.owners[param] for param in params]
            lend_gradients(self._group, joined, params, owners, self.param_groups)


class _ShadowHook(JoinHook):
    """Answers each step of the active ranks, which must step once an iteration."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Shadow one iteration; ``Join`` calls it while some rank is still active."""
        self._optimizer.shadow_step()


make_known(ZeroRedundancyOptimizer)
