"""`ZeroRedundancyOptimizer`: any ``torch.optim`` optimizer, its state sharded over ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from zero_optim.comm.agreement import called_by_all, failing_together, raise_together, take_group
from zero_optim.comm.backends import as_lists
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import PHASES, Timeout
from zero_optim.compat import private
from zero_optim.compat.autograd import register_with_pytorch
from zero_optim.dtensor.placement import group_in
from zero_optim.explain import Explanation, explain, summary
from zero_optim.health.watchdog import OnStall, learn_addresses, patient, unwatch, watch
from zero_optim.iteration.iteration import Iteration
from zero_optim.plan.costs import Cost, CostName
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces
from zero_optim.shard.lazy import LazyGather, check_reader
from zero_optim.shard.registration import registration_in
from zero_optim.state import dicts, rebinding, views
from zero_optim.state.building import add_group, build
from zero_optim.state.core import Core
from zero_optim.state.options import Params, ShardingOptions
from zero_optim.step.clip import ClipArguments
from zero_optim.step.spec import OptimizerSpec


def _part(path: str, doc: str, *, settable: bool = False) -> Any:  # noqa: ANN401 - of any type
    """Return a property that is an attribute of a part, such as ``core.groups``."""
    owner, _, name = path.rpartition(".")

    def change(optimizer: Any, value: object) -> None:  # noqa: ANN401 - as above
        setattr(attrgetter(owner)(optimizer), name, value)

    return property(attrgetter(path), change if settable else None, doc=doc)


_OWN = frozenset({"core", "iteration", "grad_scale", "found_inf"})  # the latter by scalers
_HIDDEN = {*_OWN, "begin_overlapped_step", "profile_hook_step", "OptimizerPreHook", "OptimizerPostHook"}


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shard the state of an optimizer over the ranks of a process group (ZeRO stage 1).

    Use it in place of ``optimizer_class(params, **defaults)``. As with DDP, every rank holds all parameters,
    and all gradients before `step`. One rank, the owner, keeps a parameter's state, steps it and broadcasts
    the result; a large parameter may be cut into rows of several owners. For every class that treats
    parameters one by one, a step gives the bits of the unsharded optimizer.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    All ranks construct it with the same arguments (else RankMismatchError), and together call every method
    that communicates. An error on one rank is raised on every rank, and nothing has changed unless the method
    says otherwise. ``isinstance`` takes it for ``torch.distributed.optim.ZeroRedundancyOptimizer``, but it
    trains in all iterations: leave out that class's warm-up for ``overlap_with_ddp=True``.

    Args:
        params: as for ``torch.optim``, dense; the same on every rank, in order. Ranks compare names, or
            the values of nameless parameters that look alike. DTensors, as of FSDP2, stay where they are.
        optimizer_class: the class, or a callable that builds one from groups. Ranks compare its code and
            arguments, so it must find out what differs between ranks when it is called.
        process_group: ranks to shard over; None for the default group, or that of the fully sharded model,
            or of the mesh of DTensors.
        parameters_as_bucket_view: move parameters into flat tensors, where gathers write in place. False
            copies at each step, as for shared memory and devices without DLPack.
        overlap_with_ddp: a comm hook (``hook_with_zero_step``, ``zero_step`` of `zero_optim.hooks`) steps
            during the backward pass; `step` raises if none ran.
        bucket_cap_mb: capacity of a bucket in MiB, above 0. A step sends one broadcast for each bucket and
            owner. Construction, and each gather without views, takes one bucket of extra memory.
        cost: of a parameter for its owner, balanced over ranks: "numel" for element-wise steps, "matmul" if
            the class orthogonalizes matrices (Muon), or a function of the parameter. Also a group key.
        master_dtype: dtype of the owner's copies, through which parameters of narrower floating-point dtypes
            are stepped: torch.float32 for bf16 and fp16. In the state: ``zero_optim.master``.
        ema_decay: factor below 1 of a moving average of the weights, in the state: ``zero_optim.ema``.
        gather_lazily: a model for `gather_lazily`. A copy of the optimizer waits in `step`.
        assume_separable: do not try the class. Otherwise it steps small tensors, for 10 to 60 ms the first
            time (seconds if it writes into its groups), and is refused if results differ in parts.
        cuts: cut large parameters so that ranks share each bucket evenly, where trials of the class gave the
            same bits; never what the CPU steps in half precision. Later options that forbid existing cuts
            raise ValueError in `step` and `load_state_dict`. Also a group key.
        timeout: longest wait in seconds, or a pair of that and of a wait of all ranks for each other, and not
            for the same. None for the process group's: it is ``(None, 60)``. After half of it a warning is
            logged; then every rank raises `StalledError` with the missing ranks and their last calls.
        on_stall: "exit" logs the error and ends the process with exit code 75: for launchers that restart
            jobs, and for NCCL, where a CPU that waits for the device cannot raise.
        own_options: group options that ranks may set differently, such as ``("lr",)``. Each step compares
            other plain values, and raises RankMismatchError if one differs.
        allow_unsaved: train a class whose state cannot be saved and resumed, as trials show.
        **defaults: keyword arguments of ``optimizer_class``.

    A group may have its own ``optimizer_class``, such as Muon for matrices beside AdamW. Its other options
    are then that class's arguments, and ``defaults`` do not apply.

    Attributes:
        core, iteration: its parts, for other modules of this library.

    Raises:
        ValueError: no, sparse or overlapping parameters, wrong options, a class that couples parameters.
        TypeError: parameters or a class of the wrong kind, or one whose state cannot be saved.
        RuntimeError: torch.distributed is not initialised.
    """

    param_groups = _part("core.groups", "All parameters with their options.", settable=True)
    state = _part("core.state", "State of the parameters this rank owns.", settable=True)

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
        timeout: Timeout = None,
        on_stall: OnStall = "raise",
        own_options: Sequence[str] = (),
        allow_unsaved: bool = False,
        **defaults: object,
    ) -> None:
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
            allow_unsaved=allow_unsaved,
        )
        params = as_lists(params)
        if process_group is None:
            process_group = registration_in(params).process_group or group_in(params)
        group = patient(take_group(process_group, params), timeout)
        watch(self, group, on_stall)
        with group.doing(f"{type(self).__name__}()"):
            spec = OptimizerSpec(optimizer_class, defaults)
            core, callback = build(params, spec, group, options, gather_lazily)
            self._begin(core)
            if callback is not None:
                callback(self)
        learn_addresses(group)
        if overlap_with_ddp:
            self.iteration.overlap()

    def _begin(self, core: Core) -> None:
        register_with_pytorch(ZeroRedundancyOptimizer)
        super().__setstate__({})  # makes the hooks, without reading groups again
        self.core, self.iteration = core, Iteration(core)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the hooks, as ``torch.optim`` does; no communication."""
        self.wait_for_gathers()
        return {"core": self.core}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a copied or pickled state; a copy has no overlap, lazily gathered model or mesh."""
        self._begin(state["core"])
        if not self.core.ranks.is_released:
            watch(self, self.core.ranks, self.core.inputs.options.on_stall)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that the class sets, of the shared one if there are several."""
        core: Core | None = vars(self).get("core")  # none while the hooks are made
        return {} if core is None else core.owned.local.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.core.owned.local.assign("defaults", value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        """Return an attribute of the user's class; all ranks call a method, which then gathers parameters."""
        if name in ("_overlap_with_ddp", "_overlap_info"):
            raise AttributeError(views.NOT_FOR_OURS)
        core = vars(self).get("core")  # none in a copy that is being made
        matches = [] if core is None or name.startswith("_") else core.owned.local.find(name)
        if not matches:
            is_private = name.startswith("_") and not name.startswith("__")
            why = ", and shows no private names of the class that it shards" if is_private else ""
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{why}")
        return self.iteration.forwarded_method(name, matches)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _HIDDEN]

    def __repr__(self) -> str:
        stage, groups = 3 if self.core.sharding.row_buckets else 1, super().__repr__().partition("(")[2]
        return f"{type(self).__name__}({summary(self.core)}, ZeRO stage {stage}{groups}"

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, of the user's class if that has it and this one does not; no communication."""
        core: Core | None = vars(self).get("core")
        is_own = name.startswith("_") or name in _OWN or hasattr(type(self), name)
        if is_own or core is None or not core.owned.local.assign(name, value):
            super().__setattr__(name, value)

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]  # noqa: ANN401
        """Step what this rank owns, then gather every parameter; all ranks call.

        Communicates: owners send the rows of each bucket. On return every rank has its new parameters; on
        CUDA with NCCL the current stream waits for them, not the CPU. With `gather_lazily` the modules wait.

        Args:
            closure: evaluates the model and returns the loss; on all ranks or none. One more collective of a
                byte: if it raises on a rank, all raise before anything is stepped, but not inside ``Join``
                with an overlapped step. A rank inside a collective of its own closure waits for its timeout.
            **kwargs: for the class's own ``step``.

        Returns:
            The loss of ``closure``, None without one.

        Raises:
            TypeError: ``closure`` cannot be called.
            ValueError: a cut parameter has a sparse gradient, see ``cuts``. Nothing was stepped.
            RankMismatchError: options differ, see ``own_options``, or ranks are in different calls. The step
                was taken, and parameters are equal on all ranks. Or, before anything is stepped: gradients
                differ of a parameter that was frozen when `zero_optim.ddp` wrapped the model; inside ``Join``
                a RuntimeError.
            Exception: the class's own step raises. The other ranks have stepped what they own; parameters are
                equal on all ranks.
        """
        if views.is_no_step(self.core):
            if not views.begins_state(self.core):
                return None
            with self.core.group.doing("step()"), views.values_kept(self.core):
                return self.iteration.step(self, None, {})
        with self.core.group.doing("step()"):
            return self.iteration.step(self, closure, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as in torch.optim; no communication.

        After a backward pass that broke off, a thread may still step with some: it waits for that.
        """
        with self.iteration.stepping:
            super().zero_grad(set_to_none)

    def begin_overlapped_step(self, *, joined: bool) -> None:
        """Begin a step during the backward pass, for hooks; see `Overlap.begin`."""
        self._opt_called = True  # for schedulers, which warn if it is step() that never was
        self.iteration.overlap().begin(joined=joined)

    num_steps = _part("core.snapshot.steps", "Calls of `step` on this rank, skipped ones included.")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a ``GradScaler`` calls `step` after an infinity too: Note [Infinities] in `step.amp`."""
        return self.iteration.joins.under_way or self.iteration.has_begun

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; all ranks call.

        As ``torch.nn.utils.clip_grad_norm_``; returns the norm before clipping, 0-d and equal on all ranks.
        With sharded gradients and cuts its last bits may differ from PyTorch's. One small collective; the CPU
        waits for it and the gradients. If an accelerator's group has a CPU backend, two: the CPU waits for
        ranks, but for gradients only with ``error_if_nonfinite``. Inside ``Join`` each active rank clips for
        itself, as its gradients are whole; all of them must, with equal arguments, or the step raises.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True.
            TypeError: an argument is of the wrong kind; or ValueError.
        """
        return self.iteration.clip(ClipArguments(max_norm, norm_type, error_if_nonfinite, foreach))

    def wait_for_gathers(self) -> None:
        """Wait, or with NCCL the current stream, for every parameter's new value on this rank.

        After a ``backward()`` that raised, call it to train on: part of the step may have been taken.
        """
        self.iteration.wait_for_steps()
        self.core.engine.under_way.wait()

    @called_by_all
    def gather_parameters(self) -> None:
        """Give every parameter its owner's value, on every rank; all ranks call. Communicates like a step."""
        with failing_together(self.core.group):
            self.core.refresh()
        self.core.gather_all()

    def gather_lazily(self, model: torch.nn.Module) -> LazyGather:
        """Let gathers run on after `step`: forward passes of ``model`` wait for the parameters they need.

        All ranks call, before a step and before ``torch.compile``. No communication. Reads through this
        optimizer or ``model.state_dict()`` also wait. Other code must call `wait_for_gathers` first:
        ``param.norm()``, ``copy.deepcopy(model)``, a ``forward`` that reads the weight of a module before it
        calls that module. The handle's ``remove()`` makes `step` wait again.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: the model (or its wrapper, such as DDP) has none of the parameters.
        """
        check_reader(model, self.core.params)
        return LazyGather(model, self.core.engine)

    @called_by_all
    def averaged_weights(self) -> AbstractContextManager[None]:
        """Put the averaged weights into the model inside a ``with``; all ranks enter and leave it.

        Needs ``ema_decay``. Communicates like a step, at both ends. Inside, steps, loads and saves raise.
        """
        return self.iteration.averaged_weights()

    def begin_averages_anew(self) -> None:
        """Restart averages at weights that other code changed; nothing after a step or load. Local."""
        self.core.owned.average.begin_anew()

    # ------------------------------------------------------------------ groups and state

    @called_by_all
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, the same on all ranks, which all call; ValueError if it is wrong. No owner changes."""
        add_group(self.core, param_group)

    @called_by_all
    def consolidate_state_dict(self, to: int | Sequence[int] | None = 0) -> None:
        """Bring a copy of the whole state to the CPU of some ranks, for `state_dict`; all ranks call.

        Args:
            to: group rank that receives, or several, or None for all.

        Raises:
            ValueError: ``to`` names a rank that is not in the group.
            TypeError: sending some state would run its own code, or a new optimizer could not go on with it.
        """
        dicts.consolidate(self.core, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in ``torch.optim`` format, with the current options. No communication.

        The plain optimizer loads it, and this one on any number of ranks. After a step only targets of
        `consolidate_state_dict` have it, until the next step; else NotConsolidatedError. With parameters of
        FSDP2 all ranks call and communicate, and get DTensors: Note [Which entries are DTensors] in
        `zero_optim.state.held`.
        """
        own = self.state
        # torch's own method packs the indices and runs the hooks. During the call it sees the whole state.
        self.state = dicts.whole_state(self.core)
        try:
            packed = super().state_dict()
        finally:
            self.state = own
        return dicts.with_beside(packed)

    @called_by_all
    def load_state_dict(self, state_dict: dict[str, Any] | None, src: int | None = None) -> None:
        """Load a whole state: of ``torch.optim``, PyTorch's ``ZeroRedundancyOptimizer``, or this class.

        All ranks call. Each copies what it owns; the caller's dict and tensors do not change.

        Args:
            state_dict: the same dict on every rank; with ``src`` on that rank alone, None on the others.
            src: the only group rank that has the dict. It sends each rank what that rank owns.

        Raises:
            StateMismatchError: names each parameter whose state does not fit.
            ValueError: a rank has a dict although only ``src`` may, or lacks one; or the options in the dict
                forbid existing cuts.
            Exception: of the class, or after the load of a hook of `register_load_state_dict_post_hook`.
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
        """Return the state that this rank owns, by parameter, and global entries. No communication."""
        return self.core.own_state()

    @called_by_all
    def load_owned_state(self, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> None:
        """Load what `owned_state` returned, dtypes kept, and options equal on every rank; all ranks call."""
        self.core.check_attached()
        self.wait_for_gathers()  # and for steps of a backward pass that broke off
        dicts.load_owned(self.core, state, options)()

    # ------------------------------------------------------------------ process groups that end

    def detach(self, *, wait: bool = True) -> None:
        """Release the process group and everything built on it. No communication.

        Each rank calls it between steps, before ``destroy_process_group()``, also when another rank has
        failed. `state` and `param_groups` of this rank can still be read and saved; what needs the group
        raises until `rebind`. A second call does nothing. A wrapper of `zero_optim.ddp` has its own `detach`,
        which also drops comm hooks.

        Args:
            wait: wait for pending gathers; else their parameters may have old values until `rebind`. Use
                False if a rank is stopped: the wait would last until the group's timeout.

        Raises:
            RuntimeError: the optimizer is that of a fully sharded model. It stays attached.
        """
        if self.core.ranks.is_released:
            return
        self.iteration.detach(wait=wait)
        unwatch(self)

    def rebind(self, process_group: dist.ProcessGroup | None = None, *, keep_state: bool = True) -> int:
        """Go on in another process group, which has all ranks that own state; all its ranks call, detached.

        Owners are planned anew, state moves to them in bounded pieces, and parameters are gathered. New ranks
        build their optimizer with the same arguments in any group of their own, detach it, and get the
        others' options. Comm hooks must be registered anew. In a group of fewer ranks, or after a rank has
        failed, bind with ``keep_state=False``, then load a checkpoint with `zero_optim.checkpoint.load`,
        which gives the same bits.

        Args:
            process_group: the new ranks; None for the default group.
            keep_state: False begins with new state and the present parameters.

        Returns:
            `num_steps` of the state, equal on every rank.

        Raises:
            LostStateError: no rank holds the state of the named parameters, or a step broke off half way.
            RankMismatchError: ranks hold state of different steps, or have other parameters or arguments.
            RuntimeError: an optimizer is not detached on some rank.
            ValueError: the present options forbid cuts.
            Exception: of the class. After each of these the optimizer is detached as before.
        """
        group = rebinding.new_group(self.core, process_group)
        watch(self, group, self.core.inputs.options.on_stall)
        try:
            self.iteration.rebind(group, keep_state=keep_state)
        finally:
            if self.core.ranks.is_released:  # as before
                unwatch(self)
        learn_addresses(group)
        return self.core.snapshot.steps

    # ------------------------------------------------------------------ what each rank holds

    @property
    def ranks(self) -> RankGroup:
        """The ranks that share the state."""
        return self.core.group

    def owned_parameters(self) -> list[Tensor]:
        """List the parameters of which this rank owns all rows, or some; in order."""
        return self.core.own_params()

    def owners(self) -> dict[Tensor, int]:
        """Return each parameter's owner (group rank), that of the first rows if cut; equal on every rank."""
        return {param: pieces[0].owner for param, pieces in self.pieces().items()}

    def pieces(self) -> dict[Tensor, Pieces]:
        """Return each parameter's pieces, equal on every rank: owner of rows ``[start, stop)`` of dim 0."""
        return {param: self.core.sharding.pieces[param] for param in self.core.params}

    def state_nbytes(self) -> int:
        """Return the bytes of the optimizer state that this rank holds now, each storage counted once."""
        return self.core.state_nbytes()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """Return what this rank communicated since construction or the last call. No communication.

        ``reset=False`` leaves the counts alone, for a second reader.

        - ``exposed_seconds/PHASE``: time that callers waited for communication and late ranks, packed and
          added up on the CPU; ``sent_bytes/PHASE``: what this rank's network interface sends. Notes [Exposed
          seconds] and [Bytes sent] in `zero_optim.comm.traffic`.
        - ``collectives/PHASE``, ``steps``: how many.

        Phases: ``gather`` (parameters from owners), ``reduce`` (gradients; our DDP has its own
        ``metrics()``), ``clip``, ``agree`` (construction, closures, ``Join``, scalers of sharded gradients),
        ``state`` (consolidated, or sent by one rank; not checkpoints), and ``total``.
        """
        return self.core.ranks.phase.traffic.figures(PHASES, "steps", reset=reset)

    @called_by_all
    def explain(self) -> Explanation:
        """Return what each rank holds, of which ``print()`` makes a table; all ranks call."""
        return explain(self.core)

    # ------------------------------------------------------------------ Join

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Return the hook for ``with Join([ddp_model, optimizer]):``; active ranks step once an iteration."""
        return self.iteration.join_hook()

    join_device = _part("iteration.joins.join_device", "Where ``Join`` places its own small tensors.")
    join_process_group = _part(
        "iteration.joins.join_process_group", "The group over which ``Join`` counts active ranks."
    )
    _join_config = _part("iteration.joins._join_config", "What ``Join`` sets.", settable=True)

    # ------------------------------------------------------------------ names of PyTorch's class

    @property
    def optim(self) -> Optimizer | views.OptimizerView:
        """This rank's local optimizer, or with several classes a view of all; only read it. No communication.

        Its ``param_groups`` have what this rank steps until the next step: parameters, rows, or masters. Its
        ``state`` takes these and the model's parameters.
        """
        return views.local_view(self.core)

    _all_params = _part("core.params", "All parameters, in order.")

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return {param: index for index, param in enumerate(self.core.params)}

    def _partition_parameters(self) -> list[list[ParamGroup]]:
        return views.partition(self.core)

    def _check_overlap_initialized(self) -> None:
        """Do nothing: ours is ready when it is built."""

    _sync_param_groups = staticmethod(views.sync_options)


def require_ours(optimizer: object) -> None:
    """Raise TypeError on every rank if an optimizer is not sharded by this library; all ranks call."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        name, home = type(optimizer).__name__, type(optimizer).__module__
        fix = "give one optimizer, whose groups may have an optimizer_class of their own"
        if name == ZeroRedundancyOptimizer.__name__:
            fix = "write `from zero_optim import ZeroRedundancyOptimizer`"
        elif isinstance(optimizer, Optimizer):
            fix = f"build ZeroRedundancyOptimizer(module.parameters(), {name}, ...)"
        raise_together(
            TypeError(f"expected a zero_optim.ZeroRedundancyOptimizer, got {name} of {home}: {fix}")
        )
