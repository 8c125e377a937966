"""`ZeroRedundancyOptimizer`: any ``torch.optim`` optimizer, its state sharded over ranks."""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import called_by_all, check_flags, failing_together, raise_together, ranks_of
from zero_optim.comm.backends import held
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import PHASES
from zero_optim.compat import private
from zero_optim.compat.kinship import make_known
from zero_optim.explain import Explanation, explain
from zero_optim.health.watchdog import OnStall, learn_addresses, patient, unwatch, watch
from zero_optim.iteration import Iteration
from zero_optim.plan.costs import Cost, CostName
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces
from zero_optim.shard.claims import group_of_claim
from zero_optim.shard.lazy import LazyGather, check_reader
from zero_optim.state import dicts, rebinding, torch_adapters
from zero_optim.state.building import add_group, build
from zero_optim.state.core import Core
from zero_optim.state.options import KEPT_WHOLE, Params, ShardingOptions
from zero_optim.step.clip import ClipArguments
from zero_optim.step.spec import OptimizerSpec


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shard the state of an optimizer over the ranks of a process group (ZeRO stage 1).

    Use it where ``optimizer_class(params, **defaults)`` stood. Every rank holds all parameters, and all
    gradients before `step`, as with DDP. Each parameter's state lives on one rank, its owner, which steps it
    and broadcasts the result. Of a large parameter several ranks may own rows, see ``cuts``. The parameters
    after each step are, bit for bit, those of the unsharded optimizer, for every class whose step treats
    parameters one by one.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. All
    ranks of the group must construct it, with the same arguments, and must call together: `step`,
    `add_param_group`, `consolidate_state_dict`, `load_state_dict`.

    ``isinstance`` takes it for ``torch.distributed.optim.ZeroRedundancyOptimizer``, which it replaces. With
    ``overlap_with_ddp=True`` that one does not train in its first two or three iterations, so scripts take
    some for warm-up. This one trains from the first: leave such iterations out, or their steps count.

    Args:
        params: parameters, dicts of groups, or (name, parameter) pairs, as ``torch.optim`` takes them; dense,
            of any dtypes and shapes; the same on every rank, in the same order. Names are compared. Without
            them, parameters alike are told apart by values, where ranks start with equal ones.
        optimizer_class: the class to shard, or a callable that builds one from groups. Ranks compare its
            code and arguments; what shall differ between ranks it finds out itself when it is called.
        process_group: ranks to shard over; None for the default group, or for the group of the fully sharded
            model that has the parameters.
        parameters_as_bucket_view: True moves the parameters into flat tensors, so that gathers land in place,
            and gives each a storage of its own there. False leaves ``param.data`` alone and copies at each
            step, as is also done for parameters in shared memory and on devices without DLPack.
        overlap_with_ddp: the step is taken during the backward pass, by a comm hook of `zero_optim.hooks`
            (``hook_with_zero_step``, ``zero_step``). The class is checked for that now; `step` raises if no
            hook has run.
        bucket_cap_mb: capacity of a bucket in MiB, above 0. A step issues one broadcast for each bucket and
            owner; building takes one bucket of extra memory, and without views so does each gather.
        cost: what owning a parameter costs, so that ranks get equal work: "numel" for steps that go element
            by element, "matmul" for those that orthogonalize matrices (Muon), or a function of the parameter.
            A group may name its own under the key "cost".
        master_dtype: step parameters of narrower floating-point dtypes through copies in this dtype, held by
            the owner alone: torch.float32 for bf16 and fp16. In the state: entries ``zero_optim.master``.
        ema_decay: keep an exponential moving average of the weights, each rank of what it owns, for
            `averaged_weights`; the factor by which it keeps its past at a step, below 1. In the state:
            entries ``zero_optim.ema``.
        gather_lazily: the model, whose forward passes wait for the gathers in the place of `step`, as the
            method of this name tells. Wrapped in DDP or not; compile it later. A copy of the optimizer waits
            in `step`.
        assume_separable: take the class without trying it. Otherwise it is run on small tensors, whole and
            in parts, for some 10 to 60 ms the first time, and refused if the results differ.
        cuts: large parameters may be cut, so that every bucket is divided evenly: several ranks own rows of
            one. Only where trials of the class with these options gave the same bits, parameters and state
            (`pieces` and `explain` tell). False keeps every parameter whole, and chooses owners that are even
            over the whole model, but perhaps not in each bucket. What the CPU steps in half precision is
            never cut. A group may name its own under the key "cuts". If later options forbid cuts that were
            made, `step` and `load_state_dict` raise a ``ValueError`` on every rank, before anything changes.
            So does a step where the gradient of a cut parameter is sparse, unless the class gave the same
            bits with such: plain SGD does; SGD with momentum and Adagrad do not. Keep such a group whole.
        timeout: seconds that a wait of this optimizer may take; None for the process group's own timeout.
            When one passes that, every rank raises `StalledError`, which names the ranks that are missing and
            what they did last. A warning is logged after half of it.
        on_stall: "exit" logs the error, and ends the process with exit code 75, in the place of raising:
            for jobs that a launcher starts again, and on NCCL, where a CPU that waits for the device cannot
            be made to raise.
        own_options: names of options of groups, such as ``("lr",)``, that each rank may set for itself after
            construction. All others are compared in each step, as far as they are plain values: if one
            differs, every rank raises `RankMismatchError`.
        mirror: what a rank owns (its rows of the parameters, their state, masters, averages) is copied to the
            next rank after every step, in CPU memory and over gloo, beside the next forward and backward
            pass. If a rank is lost, `rebind` on the others goes back to the end of the last step or the one
            before, without a file. Takes four times the memory of what a rank owns, and one small collective
            more a step; `explain` shows the bytes. A group of one rank has no other: it warns.
        **defaults: keyword arguments of ``optimizer_class``.

    A group may name its own ``optimizer_class``; its other options are then that class's arguments, and
    ``defaults`` do not apply to it: Muon for matrices and AdamW for the rest is one optimizer.

    Attributes:
        param_groups: all parameters with their options, the one truth for options.
        state: state of the parameters this rank owns, and of no others.
        defaults: as the class itself sets them.
        core: its parts, for other modules of this library.
        steps: how it steps, likewise.

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
        default, given = OptimizerSpec(optimizer_class, defaults), ranks_of(process_group)
        group = patient(RankGroup.of(given.process_group, params), timeout)
        watch(self, group, on_stall)
        with group.doing(f"{type(self).__name__}()"):
            core, told = build(params, default, group, options, gather_lazily)
            self._begin(core)
            if told is not None:
                told(self)
        learn_addresses(group)
        if overlap_with_ddp:
            self.iteration.overlap()

    def _begin(self, core: Core) -> None:
        self.core, self.iteration = core, Iteration(core)
        super().__setstate__({"defaults": {}})  # makes the hooks, without reading groups again
        self.defaults = core.owned.local.defaults

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the hooks, as ``torch.optim`` does; does not communicate."""
        self.wait_for_gathers()
        return {"core": self.core}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied or unpickled state; a copy has no overlap, lazily gathered model or mesh."""
        self._begin(state["core"])
        if not self.core.ranks.is_let_go:
            watch(self, self.core.ranks, self.core.inputs.options.on_stall)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        """Reach what the user's class adds, such as ``train()`` and ``eval()`` of schedule-free ones.

        All ranks call such a method; the parameters are gathered after it.
        """
        if name in ("_overlap_with_ddp", "_overlap_info"):
            raise AttributeError(torch_adapters.NOT_FOR_OURS)
        core = vars(self).get("core")  # none in a copy that is being made
        found = [] if core is None or name.startswith("_") else core.owned.local.find(name)
        if not found:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if not inspect.ismethod(found[0]):
            return found[0]
        return partial(self._call_theirs, name, found)

    def _call_theirs(self, name: str, methods: list[Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        local, groups = self.core.owned.local, self.param_groups
        work = partial(local.call, groups, methods, *args, **kwargs)
        return self.iteration.calls.make(f"{name}()", partial(self.core.owned.run, work))

    @property
    def param_groups(self) -> list[ParamGroup]:
        """All parameters with their options."""
        return self.core.groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.core.groups = groups

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """State of the parameters this rank owns."""
        return self.core.state

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        self.core.state = state

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]  # noqa: ANN401
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
        if torch_adapters.is_no_step(self.core):
            return None
        with self.core.group.doing("step()"):
            return self.iteration.step(self, closure, kwargs)

    def begin_overlapped_step(self, *, joined: bool) -> None:
        """Begin a step during the backward pass, for hooks; see `Overlap.begin`."""
        self._opt_called = True  # for schedulers, which warn if it is step() that never was
        self.iteration.overlap().begin(joined=joined)

    @property
    def num_steps(self) -> int:
        """Calls of `step` on this rank, of skipped steps too; after going back by `rebind` as many less."""
        return self.core.snapshot.steps

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a ``GradScaler`` calls `step` after an infinity too; see Note [Infinities] in `step.amp`.

        Only inside ``Join``, and where a step was begun in the backward pass, which raises. Otherwise the
        question is counted: Note [What a count cannot tell] in `zero_optim.health.stamps`.
        """
        if self.iteration.joins.under_way or self.iteration.has_begun:
            return True
        stamps = self.core.sharding.gathers.stamps
        if stamps is not None:
            stamps.asked += 1
        return False

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients down so that their global norm is at most ``max_norm``; all ranks call.

        ``torch.nn.utils.clip_grad_norm_`` with the owners' gradients: the norm is the same on every rank, and
        each is taken once, by its owner. Where gradients are sharded, the norm of a parameter that is cut is
        combined from those of its rows, and may differ from PyTorch's in the last bits. One small collective;
        the CPU waits for it and for the gradients. If parameters are on an accelerator and the group has a
        backend for the CPU beside that of the device, two: the CPU waits for other ranks to call, and for no
        gradient. With ``error_if_nonfinite`` it waits for the norm. Inside ``Join`` the norm is that of the
        ranks that have inputs left, all of which must clip; one more collective of a byte.

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
        return self.iteration.clip(ClipArguments(max_norm, norm_type, error_if_nonfinite, foreach))

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; returns at once if nothing is under way.

        On CUDA with NCCL the current stream waits, not the CPU. To be called when ``backward()`` has raised
        and training goes on all the same: part of the step may have been taken.
        """
        self.iteration.wait_for_steps()
        self.core.sharding.under_way.wait()

    @called_by_all
    def gather_parameters(self) -> None:
        """Give every parameter its owner's value, on every rank; all ranks call. Communicates like a step."""
        with failing_together(self.core.group):
            self.core.sharding.refresh(self.param_groups)
        self.core.sharding.gather_all()

    def gather_lazily(self, model: torch.nn.Module) -> LazyGather:
        """Let gathers run on after `step`: forward passes of ``model`` wait for the parameters they need.

        Each module waits for its own; with clipping, the norm alone is waited for after the backward pass.
        The constructor's ``gather_lazily=model`` does the same. All ranks call, before a step. Does not
        communicate. Reading parameters through this optimizer or through ``model.state_dict()`` also waits.
        Code that reads them in another way must call `wait_for_gathers` first: ``param.norm()``,
        ``copy.deepcopy(model)``, a ``forward`` that reads the weight of a module before it calls that
        module. Call this before ``torch.compile``, not after.

        Args:
            model: the model with the parameters, or a wrapper such as DDP.

        Returns:
            A handle; its ``remove()`` makes `step` wait again.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: it has none of the parameters.
        """
        check_reader(model, self.core.params)
        return LazyGather(model, self.core.sharding)

    @called_by_all
    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model for the time of a ``with``; all ranks enter and leave it.

        Needs ``ema_decay``. Communicates like a step, at the start and at the end. Inside, a step raises, and
        so does a load, or a save of model and optimizer together.
        """
        average, sharding = self.core.owned.average, self.core.sharding
        with failing_together(self.core.group):
            sharding.refresh(self.param_groups)
            average.check_swap_in()
        try:
            average.swap_in()  # now that no rank refuses
            sharding.gather_all()
            yield
        finally:
            average.swap_out()
            sharding.gather_all()

    def begin_averages_anew(self) -> None:
        """Begin the averages (``ema_decay``) at the present weights. Does not communicate.

        For code that gives the weights other values after construction, as `ShardedDataParallel` does, whose
        ranks take those of the first. Once a step was taken, or a state was loaded, it does nothing.
        """
        self.core.owned.average.begin_anew()

    # ------------------------------------------------------------------ groups and state

    @called_by_all
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all ranks call, with the same group. No parameter changes its owner.

        Raises:
            ValueError: on every rank, if the group is wrong on any rank. Nothing is added then.
            RankMismatchError: likewise, if the groups differ between ranks.
        """
        add_group(self.core, param_group)

    @called_by_all
    def consolidate_state_dict(self, to: int | Sequence[int] | None = 0) -> None:
        """Bring the whole optimizer state to some ranks, for `state_dict` there; all ranks call.

        Owners send directly to the targets; other ranks receive nothing. The received state is a copy in CPU
        memory that later steps do not change. What other ranks already hold stays valid.

        Args:
            to: group rank that receives, or several, or None for all.

        Raises:
            ValueError: on every rank, if ``to`` names a rank that is not in the group.
            RankMismatchError: ``to`` differs between ranks.
            TypeError: sending some state would run its own code, or the class keeps state outside of
                ``state``.
        """
        dicts.consolidate(self.core, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the format of ``torch.optim``; does not communicate.

        Before any step it works on every rank. After a step it works on the ranks to which
        `consolidate_state_dict` brought the state, until the next step. Options are the current ones. The
        dict loads into the plain optimizer, and into this one with any world size. Two calls share tensors,
        which are never written to.

        Raises:
            NotConsolidatedError: the state is not on this rank, or a step was made after it was consolidated.
        """
        own = self.state
        # torch's own method packs the indices and runs the hooks. During the call it sees the whole state.
        self.state = dicts.whole_state(self.core)
        try:
            return super().state_dict()
        finally:
            self.state = own

    @called_by_all
    def load_state_dict(self, state_dict: dict[str, Any] | None, src: int | None = None) -> None:
        """Load a whole state; all ranks call.

        Takes dicts of ``torch.optim``, of PyTorch's ``ZeroRedundancyOptimizer`` and of this class. Each rank
        copies what it owns. The caller's dict and its tensors do not change.

        Args:
            state_dict: the same dict on every rank. With ``src``, the dict on that rank and None on the
                others.
            src: the only group rank that has the dict, for example from a file. It sends each rank what that
                rank owns; no other rank ever holds the whole state.

        Raises:
            StateMismatchError: on every rank, naming each parameter whose state does not fit.
            RankMismatchError: the options in the dicts, or ``src``, differ between ranks.
            ValueError: a rank gives a dict although only ``src`` may, or a rank that must give one does not.
                Also if parameters are cut, and the class does not bear that with the options in the dict.
            Exception: on every rank, what the class itself raises on any rank. After any of these errors
                nothing has changed. What a hook of `register_load_state_dict_post_hook` raises comes after
                the load.
        """
        with self.core.group.doing("load_state_dict()"):
            self.wait_for_gathers()  # and for steps of a backward pass that broke off
            dicts.load(self.core, state_dict, src, self._run_load_hooks)
            with failing_together(self.core.group):
                for done_hook in self._optimizer_load_state_dict_post_hooks.values():
                    done_hook(self)

    def _run_load_hooks(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for load_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = load_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def owned_state(self) -> dict[Any, Any]:
        """Return the state that this rank owns, by parameter, and global entries; does not communicate.

        Of a cut parameter it is the state of this rank's piece: tensors have the shape of the piece where the
        class's own would have that of the parameter.
        """
        return self.core.own_state()

    @called_by_all
    def load_owned_state(self, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> None:
        """Load what `owned_state` returned, and each group's options, equal on every rank; all ranks call.

        Unlike `load_state_dict`, which casts state to the parameters' dtype as ``torch.optim`` does, every
        tensor keeps its dtype, and becomes the optimizer's own. If it raises, on every rank, nothing has
        changed.
        """
        self.core.check_attached()
        self.wait_for_gathers()  # and for steps of a backward pass that broke off
        dicts.load_owned(self.core, state, options)

    # ------------------------------------------------------------------ process groups that end

    def detach(self, *, wait: bool = True, staying: Sequence[int] | None = None) -> None:
        """Let go of the process group, and of all that was made for it; does not communicate.

        To be called before ``destroy_process_group()``, also when another rank has failed. Every rank calls
        for itself, between steps. Afterwards `state`, `param_groups` and what else this rank owns can be read
        and saved; whatever needs the group raises until `rebind`. Gradients stay, unless they are sharded. A
        second call does nothing. The wrapper's `zero_optim.ddp.DistributedDataParallel.detach` does the same
        for it; comm hooks go with it.

        Args:
            wait: wait for gathers under way. If a rank died before it sent its part, other ranks' parameters
                may have old values here; `rebind` brings the right ones. False waits for nothing: where a
                rank is stopped, not dead, the wait lasts until the timeout of the group.
            staying: the group ranks that will go on, where the next group has fewer. The others first hand
                their state over to them. Then all ranks call, with the same ranks, and it communicates. None
                hands nothing over.

        Raises:
            ValueError: on every rank: ``staying`` names no ranks of the group.
            Exception: likewise, if the state cannot be handed over. The optimizer is attached as before.
        """
        if self.core.ranks.is_let_go:
            return
        if self.core.inputs.units:
            raise RuntimeError(
                "the optimizer of a fully sharded model cannot be detached: each rank holds a part of the "
                "parameters. Save a checkpoint, build model and optimizer anew, and load it"
            )
        self.iteration.end_overlap(waits=wait)
        if staying is not None:
            rebinding.hand_over(self.core, staying)
            self.defaults = self.core.owned.local.defaults
        else:
            rebinding.detach(self.core, wait=wait)
        self.iteration.calls.let_go()
        self.iteration.joins.let_go()
        unwatch(self)

    def rebind(self, process_group: dist.ProcessGroup | None = None, *, keep_state: bool = True) -> int:
        """Go on in another process group, with as many ranks as it has; all its ranks call, detached.

        Owners are planned anew, and state goes from the ranks that hold it to those that own it now, in
        pieces of bounded size. Then parameters are gathered. Ranks may come new to the group: they build
        their optimizer with the same arguments as the others did, in any group of their own, and detach it;
        they are given the others' options. A lazily gathered model stays lazily gathered. Comm hooks have to
        be registered anew.

        With ``mirror=True`` ranks may be lost, or hold state of different moments. Then all ranks go back to
        the end of the last step of which mirrors are whole among them: parameters, state, averages and
        options. Options that a scheduler changes have to be set again.

        Args:
            process_group: the new ranks; None for the default group.
            keep_state: False begins with new state, and with the parameters as they are. When state was lost,
                `zero_optim.checkpoint.rebind` does that and loads.

        Returns:
            How many calls of `step` the state has taken, on every rank: `num_steps`. After going back this is
            less than before, by one as a rule: from there the caller's data and schedulers go on. Calls are
            counted from the construction, also where a state was loaded.

        Raises:
            LostStateError: on every rank: nobody in the group holds the state of some parameters, which are
                named, or a step broke off half way. With mirrors: a rank and its buddy are lost, or no step
                was taken yet.
            RankMismatchError: likewise: ranks hold state of different moments, or have other parameters or
                arguments.
            RuntimeError: likewise: an optimizer is not detached on some rank.
            ValueError: likewise: options were changed to some with which the class does not bear cuts.
            Exception: likewise, what the class itself raises on any. After each of these errors the optimizer
                is detached as it was before.
        """
        self._rebind(process_group, keep_state=keep_state, may_lose=False)
        return self.num_steps

    def rebind_held(self, process_group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Go on in another process group as by `rebind`, with the state that its ranks hold; all call.

        Returns:
            The parameters of which some state is lost, the same on every rank. They have no state now, and
            perhaps wrong values: the caller brings both, as `zero_optim.checkpoint.rebind` does.
        """
        return self._rebind(process_group, keep_state=True, may_lose=True)

    def _rebind(
        self, process_group: dist.ProcessGroup | None, *, keep_state: bool, may_lose: bool
    ) -> list[Tensor]:
        core = self.core
        group = rebinding.new_group(core, process_group)
        watch(self, group, core.inputs.options.on_stall)
        try:
            lost = rebinding.rebind(core, group, keep_state=keep_state, may_lose=may_lose)
        finally:
            if core.ranks.is_let_go:  # as before
                unwatch(self)
        self.defaults = core.owned.local.defaults
        if core.inputs.options.overlap_with_ddp:
            self.iteration.overlap()
        learn_addresses(group)
        return lost

    # ------------------------------------------------------------------ what each rank holds

    @property
    def ranks(self) -> RankGroup:
        """The ranks that share the state."""
        return self.core.group

    def owned_parameters(self) -> list[Tensor]:
        """List the parameters of which this rank owns all rows, or some; in order."""
        return self.core.own_params()

    def owners(self) -> dict[Tensor, int]:
        """List for each parameter the group rank that keeps its state; equal on every rank.

        Of a parameter that is cut it is the rank that keeps the state of the first rows; see `pieces`.
        """
        return {param: pieces[0].owner for param, pieces in self.pieces().items()}

    def pieces(self) -> dict[Tensor, Pieces]:
        """List for each parameter its pieces; equal on every rank.

        Each is (owner, start, stop): the group rank that keeps the state of rows ``[start, stop)`` of
        dimension 0. A parameter that is not cut has one.
        """
        return {param: self.core.sharding.pieces[param] for param in self.core.params}

    def state_nbytes(self) -> int:
        """Return the bytes of the optimizer state that this rank holds now, each storage counted once."""
        return self.core.state_nbytes()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """Tell what this rank communicated since the last call, for any logger. Does not communicate.

        The first call counts from the construction. A copy of the optimizer counts from zero.

        - ``exposed_seconds/PHASE``: how long communication held callers up: they waited, also for ranks that
          came late, or on the CPU packed, added up and handed out what is sent. What a thread does beside
          them is left out. On an accelerator these are waits of the CPU alone: with NCCL it does not wait,
          and the figure says nothing of the device. See Note [Exposed seconds] in `zero_optim.comm.traffic`.
        - ``sent_bytes/PHASE``: what this rank's network interface sends, see Note [Bytes sent] there.
        - ``collectives/PHASE``: how many were started.
        - ``steps``: how many were taken, to divide by.

        The phases:

        - ``gather``: owners send parameters.
        - ``reduce``: gradients go to their owners, or are averaged by `zero_optim.hooks.zero_step` itself.
          Other reductions are DDP's. Ours has ``metrics()`` too, where its wait for a comm hook is counted.
        - ``clip``: `clip_grad_norm_`.
        - ``agree``: what ranks tell each other at construction, for a closure or ``Join``, and what the
          scalers of sharded gradients tell each other.
        - ``state``: consolidated states, and state dicts that one rank deals out. Not checkpoints.
        - ``mirror``: what goes to the buddy, with ``mirror=True``.
        - ``total``: all of them.

        Args:
            reset: count from zero again; False leaves the counts alone, for a second reader.
        """
        return self.core.ranks.phase.traffic.figures(PHASES, "steps", reset=reset)

    @called_by_all
    def explain(self, *, quiet: bool = False) -> Explanation:
        """Print on rank 0 what each rank really holds: parameters, state, balance, buckets; all ranks call.

        Args:
            quiet: print nothing.

        Returns:
            The same as data, on every rank.

        Raises:
            TypeError: on every rank, if an argument is wrong on any.
        """
        core = self.core
        with core.group.doing("explain()"):
            with failing_together(core.group):
                check_flags(quiet=quiet)
            reasons = core.sharding.whole_because | dict.fromkeys(core.inputs.kept_whole, KEPT_WHOLE)
            nbytes = core.state_nbytes(), core.mirror_nbytes()
            explanation = explain(core.group, core.sharding, core.owned.local, core.groups, reasons, *nbytes)
        if core.group.rank == 0 and not quiet:
            print(explanation)  # noqa: T201 - what it is for
        return explanation

    # ------------------------------------------------------------------ Join

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Give ``torch.distributed.algorithms.Join`` what shadows this optimizer's steps.

        Works beside DDP: ``with Join([ddp_model, optimizer]):``. Ranks still active must step once in each
        iteration. Takes no options of its own.
        """
        return self.iteration.join_hook()

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` places its own small tensors."""
        return self.iteration.joins.join_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self.iteration.joins.join_process_group

    @property
    def _join_config(self) -> Any:  # noqa: ANN401 - a private type of PyTorch
        return self.iteration.joins._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:  # noqa: ANN401 - as above
        self.iteration.joins._join_config = config

    # ------------------------------------------------------------------ names of PyTorch's class

    @property
    def optim(self) -> Optimizer | torch_adapters.OptimizerView:
        """The local optimizer of this rank, or with several classes a view of all local optimizers.

        PyTorch's class has it too. Its ``param_groups`` have what this rank steps: parameters, the rows that
        it owns of cut ones, or master copies. Its ``state`` is found by these, and by the parameters of the
        model. Only read it. Does not communicate. The rows that it steps of a cut parameter have values until
        the next step; after that, ask again.
        """
        return torch_adapters.local_view(self.core)

    @property
    def _all_params(self) -> list[Tensor]:
        return self.core.params

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return {param: index for index, param in enumerate(self.core.params)}

    def _partition_parameters(self) -> list[list[ParamGroup]]:
        return torch_adapters.partition(self.core)

    def _check_overlap_initialized(self) -> None:
        """Do nothing: ours is ready when it is built."""

    @staticmethod
    def _sync_param_groups(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
        torch_adapters.sync_options(source, target)


make_known(ZeroRedundancyOptimizer)


def require_ours(optimizer: object) -> None:
    """Refuse what is not sharded by this library, with a TypeError on every rank; all ranks call."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        kind = type(optimizer).__name__
        raise_together(TypeError(f"expected a zero_optim.ZeroRedundancyOptimizer, got {kind}"))
