"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3).

Note [No part in Join]
    A rank that ran out of inputs would have to start each gather that the others start, in their order, which
    depends on the modules that they call. The order of the pass before may be wrong: for a batch of another
    kind, bytes of units of different sizes would meet. To send the number of each unit before its gather is a
    collective more for each, in which time nothing can be fetched. So ``Join`` is refused.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.comm.mesh import RankMesh, agree_between_replicas
from zero_optim.comm.watchdog import unwatch
from zero_optim.compat.engine import require
from zero_optim.ddp.full.choice import Units
from zero_optim.ddp.full.construction import Asked, RanksToBe, UnitConstruction, ignored_names
from zero_optim.ddp.full.filling import Init, has_meta, take_values_of_first
from zero_optim.ddp.full.guards import refuse_conversions
from zero_optim.ddp.full.module_hooks import PassHooks, hook_params, hook_up
from zero_optim.ddp.full.offload import Offload
from zero_optim.ddp.full.unit import OUTERMOST, Unit, UnitSupply
from zero_optim.ddp.full.units import UnitsInUse
from zero_optim.ddp.owners.launch_places import LaunchPlaces
from zero_optim.ddp.owners.owner_reducer import Accumulate, OwnerReducer
from zero_optim.ddp.owners.wrapper_checks import (
    REFUSED,
    check_arguments,
    check_group,
    check_module,
    check_optimizer,
)
from zero_optim.ddp.precision.precision import PrecisionPolicy, sparse_names
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.graph import replaced
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.ddp.reducer.model_agreement import agree_on_model
from zero_optim.ddp.reducer.report import names_text
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.shard.unit_gathers import GathersFromOwners, GathersInReplicas, UnitGathers
from zero_optim.shard.unit_marks import UnitMarks
from zero_optim.shard.unit_stamps import UnitStamps
from zero_optim.step.unreduced import NOT_REDUCED, FrozenParams

NEEDED: tuple[tuple[object, str], ...] = (  # see Note [Private names] in zero_optim.compat.engine
    (dist, "_broadcast_coalesced"),
    (torch.autograd, "_unsafe_preserve_version_counter"),
)
require(NEEDED, __name__)

_BUFFERS_AT_ONCE = 250 * 2**20  # bytes, as in PyTorch's DDP
_PREFETCHES = "the next unit is always on its way while one is used; leave it out"
_IGNORES = "freeze these parameters and leave them out of the optimizer: they stay whole on every rank"
_OFFLOADS = (
    'offload="cpu" keeps what a rank owns on the CPU, and offload=zero_optim.ddp.Offload(folder, budget) '
    "in files"
)
_TAKES_FIRST = "every rank takes the values of rank 0; leave it out"

_REFUSED = {
    **REFUSED,
    "auto_wrap_policy": "give the modules that are gathered together, or their classes, as units=",
    "backward_prefetch": _PREFETCHES,
    "cpu_offload": _OFFLOADS,
    "device_id": "move the model before its first forward pass; for one on the meta device give device=",
    "forward_prefetch": _PREFETCHES,
    "ignored_modules": _IGNORES,
    "ignored_params": _IGNORES,
    "ignored_states": _IGNORES,
    "limit_all_gathers": _PREFETCHES,
    "mp_policy": "give it as mixed_precision=",
    "offload_policy": _OFFLOADS,
    "param_init_fn": "give it as init=",
    "sharding_strategy": "parameters are sharded; reshard_after_forward=False keeps them whole until the "
    "backward pass (SHARD_GRAD_OP), and mesh= makes replicas (HYBRID_SHARD)",
    "sync_module_states": _TAKES_FIRST,
    "use_orig_params": "parameters are always the model's own; leave it out",
}


class FullyShardedDataParallel(nn.Module):
    """Keep each parameter on its owners alone, and gather it while it is used (ZeRO stage 3).

    The optimizer is built before or after, and the loop stays as it is::

        model = FullyShardedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    The parameters stay plain tensors, whole matrices where the class needs that. A *unit*, a module, is
    gathered before it is called and freed after it, and again in the backward pass, where its gradients are
    reduced to their owners when all are there. Meanwhile the next unit is on its way. At other times a
    parameter shows NaN, and a write to it raises: `unsharded` makes parameters whole to be read and written.

    Convert and move the model before it is wrapped: behind that ``to()``, ``half()`` and the like raise, if
    they would change a parameter.

    Bits are those of ``ShardedDataParallel`` with the same units. ``state_dict()`` is whole on every rank and
    ``load_state_dict()`` takes a whole one; both communicate, so all ranks call them.

    Args:
        module: what to train.
        optimizer: has all of its parameters that require a gradient. Parameters that it does not have
            stay whole on every rank. None if it is built later, over the wrapper's parameters, before the
            first backward pass: then no rank needs memory for more than the model and one unit.
        units: "auto", modules, classes of modules, or a function that tells of a module whether it is a unit.
            Parameters in no unit belong to the outermost one, which is whole from the forward to the backward
            pass.
        reshard_after_forward: False keeps units whole from the forward to the backward pass: 2 (W-1)/W times
            the parameters' bytes are sent in an iteration, and not 3. A number keeps so many, the last ones.
        guards_reads: let the backward pass come to a unit by a tensor that its modules kept aside, and did
            not return. Takes about 2 µs of the CPU for each tensor that autograd saves. False is needed where
            modules call ``torch.func.grad`` or ``torch.func.vjp``.
        offload: an `Offload` keeps what this rank owns in files; the class must bear to be stepped some
            parameters at a time. "cpu", for a model on an accelerator, keeps it in pinned memory of the CPU:
            rows, gradients, state. Units come to the device while they are used, and the optimizer steps on
            the CPU. None keeps it where the parameters are. The same on every rank.
        accumulate: as in `ShardedDataParallel`, as are the other options.
        process_group: that of the optimizer; where it comes later, None for the default group.
        mesh: as in `ShardedDataParallel`; units are gathered inside each replica. The optimizer is built over
            one row of it, so that each replica has all state; or over all its ranks: then state is there
            once, and a rank holds copies of the rows that other replicas own, so that units are gathered
            inside all the same. See Note [Held by a replica] in `zero_optim.shard.unit_gathers`.
        mixed_precision: a `PrecisionPolicy`; or one of PyTorch's for its own wrappers. Then ``param.dtype``
            is the dtype to compute with, and owners keep and step the parameters as they were. None leaves
            all dtypes alone.
        device: where parameters and buffers that are on the meta device are to be; None for the default one.
        init: called with each module that has some there, under ``torch.no_grad()``, to give them their first
            values; None for the module's own ``reset_parameters()``. Modules come after those below them.
            Each rank calls it, and takes the values of rank 0. A model on the meta device is wrapped without
            an optimizer, and no rank ever holds the whole of it.

    Raises:
        TypeError: on every rank; as `ShardedDataParallel`, or ``units`` are none.
        ValueError: likewise; or a unit is no module of the model; or ``mixed_precision`` does not fit it; or
            the budget of ``offload`` is too small; or a module on the meta device cannot be initialized, or
            was not.
        OSError: on the rank where the disk is too small for ``offload``; a `RemoteRankError` on the others.
    """

    units: UnitsInUse
    _optimizer: ZeroRedundancyOptimizer
    _reducer: OwnerReducer

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | None = None,
        *,
        units: Units = "auto",
        reshard_after_forward: bool | int = True,
        guards_reads: bool = True,
        accumulate: Accumulate = "owner",
        offload: Offload | Literal["cpu"] | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        mixed_precision: PrecisionPolicy | object | None = None,
        device: torch.device | str | None = None,
        init: Init | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        """Check, agree with the other ranks, wrap, and free everything."""
        super().__init__()
        self._asked = Asked(
            units,
            reshard_after_forward,
            guards_reads,
            offload,
            mixed_precision,
            accumulate,
            device,
            init,
            mesh,
        )
        self._options = options
        self._built: UnitConstruction | None = None
        self._mesh: RankMesh | None = None
        self.require_backward_grad_sync = self._sends_buffers = True
        if optimizer is not None:
            require_ours(optimizer)
        doing = nullcontext() if optimizer is None else optimizer.ranks.doing("FullyShardedDataParallel()")
        try:
            with doing:
                self._choose(module, optimizer, process_group)
            self._fill(module)
        except BaseException:
            self._give_up()
            raise

    # ------------------------------------------------------------------ built

    def _give_up(self) -> None:
        if self._built is not None:
            self._built.give_up()

    @property
    def _construction(self) -> UnitConstruction:
        assert self._built is not None  # by the constructor
        return self._built

    @property
    def _everyone(self) -> RankGroup:
        """All ranks that train the model: those of the optimizer, or of the mesh."""
        return self._optimizer.ranks if self._mesh is None else self._mesh.everyone

    def _choose(
        self, module: nn.Module, optimizer: ZeroRedundancyOptimizer | None, group: dist.ProcessGroup | None
    ) -> None:
        """Check the arguments, choose the units, and the optimizer that has them; all ranks call."""
        asked = self._asked
        known = None
        if optimizer is not None:
            self._mesh = RankMesh.of(asked.mesh, optimizer.ranks, may_split=True)
            known = optimizer.ranks if self._mesh is None else self._mesh.everyone
        ranks = RanksToBe(asked.mesh, group, known)
        with ranks.failing_together():
            check_arguments(type(self), asked.accumulate, self._options, _REFUSED)
            check_module(module)
            if optimizer is not None:
                check_group(optimizer, group)
                check_optimizer(module, optimizer)
                if has_meta(module):
                    raise ValueError(
                        "a part of the model is on the meta device: wrap it without an optimizer, then build "
                        "the optimizer with wrapped.parameters()"
                    )
            self._built = built = UnitConstruction(module, asked, weakly(self._change_optimizer))
            built.take(optimizer)
        ranks.agree(built.describe(), f"the arguments of {type(self).__name__}")
        if optimizer is None:
            with ranks.failing_together():
                optimizer = built.stand_in(ranks.process_group, self._options)
            self._mesh = RankMesh.of(asked.mesh, optimizer.ranks, may_split=True)
        self._optimizer = optimizer

    def _fill(self, module: nn.Module) -> None:
        """Give every rank the values of the first, keep what each owns of them, and wrap; all ranks call."""
        built, options, everyone = self._construction, self._options, self._everyone
        arguments = {"module": module, "process_group": everyone.process_group, **options}
        agree_on_model(arguments, self, options.get("timeout"), options.get("on_stall", "raise"))
        syncs = bool(options.get("init_sync", True))
        built.fill(self._optimizer, everyone, syncs=syncs)
        ignored = ignored_names(module)
        if syncs and options.get("broadcast_buffers") is not False:
            buffers = [buffer for name, buffer in module.named_buffers() if name not in ignored]
            take_values_of_first(everyone.during("agree"), buffers)
        built.policy.cast_for_good(module, ignored)
        self.module = module
        named = [pair for pair in module.named_parameters() if pair[0] not in ignored]
        self._frozen = FrozenParams([(name, param) for name, param in named if not param.requires_grad])
        self._make_reducer()
        self._optimizer.mesh = None if self._mesh is None else self._mesh.of_owners
        self._optimizer.begin_averages_anew()  # from the weights that the ranks have by now
        built.claim.is_open = built.stands_in
        built.claim.everyone = None if self._mesh is None else everyone
        refuse_conversions(module, built.claim.units)
        PassHooks(self).hang_on(module)

    def _make_reducer(self) -> None:
        """Build what reduces gradients for the optimizer, and gather units for it; all ranks call."""
        optimizer, mesh, built, options = self._optimizer, self._mesh, self._construction, self._options
        ignored, sparse = ignored_names(self.module), sparse_names(self.module)
        named = [pair for pair in self.module.named_parameters() if pair[0] not in ignored]
        pairs = [(name, param) for name, param in named if param.requires_grad]
        with failing_together(self._everyone):
            optimizer.check_sparse(param for name, param in pairs if name in sparse)
        if mesh is not None:
            agree_between_replicas(mesh.everyone, optimizer.describe())
        reducer = OwnerReducer(
            pairs,
            optimizer,
            ReducerOptions(
                bucket_caps_nbytes=(optimizer.bucket_cap_nbytes,),
                find_unused_parameters=bool(options.get("find_unused_parameters", False)),
                static_graph=bool(options.get("static_graph", False)),
                reduce_dtype=built.policy.reduce_dtype,
                timeout=options.get("timeout"),
                on_stall=options.get("on_stall", "raise"),
            ),
            sparse=[name for name, _ in pairs if name in sparse],
            wanted=_wanted(weakref.ref(self)),
            mesh=mesh,
            outermost={param for param, number in built.choice.unit_of.items() if not number},
        )
        reducer.expect(
            True
        )  # modules may be called by themselves, before the first forward pass of the whole
        self._reducer, stamps = reducer, optimizer.unit_stamps()
        gathers = self._unit_gathers(reducer, stamps)
        if hasattr(self, "units"):
            self.units.supply.use(optimizer.ranks, gathers, stamps)
        else:
            supply = UnitSupply(_units(built, reducer.params), optimizer.ranks, gathers, stamps)
            self.units = UnitsInUse(supply, self._asked.num_kept, guards_reads=self._asked.guards_reads)
            hook_up(built.choice, self.units)
            built.policy.hook_up(built.choice.modules)
        self.units.places = reducer.places = self._launch_places(reducer)
        self._handles = hook_params(self.units, reducer.params)

    def _launch_places(self, reducer: OwnerReducer) -> LaunchPlaces:
        """Make what holds buckets of gradients back."""
        reference, unit_of = weakref.ref(reducer), self._construction.choice.unit_of

        def running() -> BackwardPass | None:
            reducer = reference()
            return None if reducer is None else reducer.running

        buckets = reducer.assignment.buckets
        return LaunchPlaces(self.units.units, [unit_of[bucket.params[0]] for bucket in buckets], running)

    def _unit_gathers(self, reducer: OwnerReducer, stamps: UnitStamps) -> UnitGathers:
        """Choose how units are gathered; all ranks call, and it communicates."""
        ranks, mesh, built = self._optimizer.ranks, self._mesh, self._construction
        names = [f"unit {name}" if name else OUTERMOST for name in built.choice.names]
        units = list(zip(names, built.claim.buckets, strict=True))
        if mesh is None or not mesh.splits_state:
            return GathersFromOwners(ranks, lanes_for_rows(ranks, built.claim.units), UnitMarks(units, ranks))
        inner, across = (
            lanes_for_rows(replace(part, phase=ranks.phase), built.claim.units)
            for part in (mesh.inner, mesh.across)
        )
        reference = weakref.ref(reducer)

        def num_reduced() -> int:
            reducer = reference()
            return 0 if reducer is None else reducer.history.num_passes

        keeping = self._optimizer.row_keeping
        return GathersInReplicas(mesh, inner, across, units, stamps, reducer.params, num_reduced, keeping)

    def _change_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Reduce gradients for an optimizer that has come later; all ranks call, and it communicates."""
        self._optimizer = optimizer
        if self._mesh is not None:
            self._mesh = self._mesh.owned_by(optimizer.ranks)
            optimizer.mesh = self._mesh.of_owners
        for handle in self._handles:
            handle.remove()
        self._reducer.close()
        unwatch(self._reducer)
        self._make_reducer()

    # ------------------------------------------------------------------ a forward pass

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the module, whose hooks do the rest."""
        return self.module(*inputs, **kwargs)

    def before_forward(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - the user's
        """Begin a forward pass; called by the hook of the module, and so is `after_forward`."""
        self.units.forget_calls()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._reducer.activity.begin("forward pass")
            self._reducer.check_finished(waits=False)
        if self._sends_buffers and self._options.get("broadcast_buffers") is not False:
            self._send_buffers()
        if not self._options.get("device_ids"):
            return None
        device = self._reducer.params[0].device
        return replaced(args, lambda each: each.to(device)), replaced(kwargs, lambda each: each.to(device))

    def after_forward(self, output: object) -> object:
        """Expect a backward pass; not called if the module has raised."""
        trains = torch.is_grad_enabled()
        self._sends_buffers = trains and self.require_backward_grad_sync
        if trains:
            unfrozen = [name for name, _ in self._frozen.unfrozen()]
            if unfrozen:  # before each rank trains them with gradients of its own
                raise RuntimeError(f"{names_text(unfrozen)} {NOT_REDUCED}")
            self._reducer.activity.end("forward pass")
            self._reducer.expect(self.require_backward_grad_sync)
        if self._sends_buffers:
            self._reducer.prepare(output)
        return output

    @torch.no_grad()
    def _send_buffers(self) -> None:
        """Give every rank the buffers of the first."""
        ignored = ignored_names(self.module)
        buffers = [buffer for name, buffer in self.module.named_buffers() if name not in ignored]
        if not buffers:
            return
        record = self._reducer.begin_work("")
        record.phase = "buffers"
        autograd, untyped = torch.autograd, dist
        with record.waiting(), autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]
            untyped._broadcast_coalesced(self.process_group, buffers, _BUFFERS_AT_ONCE, 0)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ as in `ShardedDataParallel`

    @property
    def process_group(self) -> dist.ProcessGroup:
        """All ranks that train the model."""
        return self._everyone.process_group

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up gradients on each rank, whole, in the passes of this context; with ``accumulate="local"``.

        Raises:
            RuntimeError: ``accumulate`` is "owner".
        """
        if self._asked.accumulate == "owner":
            raise RuntimeError(
                'accumulate="owner" adds several backward passes up in the rows of the owners, without '
                'no_sync(): leave it out, or build FullyShardedDataParallel with accumulate="local"'
            )
        return self._without_sync()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:  # noqa: ANN401 - as there
        """Clip the gradients as ``optimizer.clip_grad_norm_`` does, which this calls; all ranks call."""
        return self._optimizer.clip_grad_norm_(max_norm, norm_type, **options)

    def check_finished(self) -> None:
        """Raise, on every rank, if the last backward passes were incomplete; see `DistributedDataParallel`.

        All ranks call. Waits for the device.

        Raises:
            ReductionError: with what every rank that failed has to say.
        """
        self._reducer.check_finished()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """Tell what reductions communicated since the last call; see `DistributedDataParallel.metrics`."""
        return self._reducer.metrics(reset=reset)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a whole state dict, as ``nn.Module`` does; all ranks call. Each unit is gathered for it.

        Raises:
            TypeError: on every rank: ``state_dict`` is no mapping on any. Nothing was loaded then.
        """
        with failing_together(self._everyone):
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"expected state_dict to be a mapping, got {type(state_dict).__name__}")
        return super().load_state_dict(state_dict, *args, **kwargs)

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse ``Join``: a rank without inputs does not call the units that the others gather.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "FullyShardedDataParallel takes no part in Join: ranks that ran out of inputs would have to "
            "gather the units that the others use. Give every rank as many batches"
        )

    def register_comm_hook(self, state: object, hook: object) -> NoReturn:
        """Refuse a comm hook: gradients are reduced to owners here.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "FullyShardedDataParallel reduces gradients to their owners, and takes no comm hook: use "
            "zero_optim.ddp.DistributedDataParallel with it"
        )

    def detach(self) -> NoReturn:
        """Refuse to let go of the process group: no rank holds the parameters.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("FullyShardedDataParallel cannot be detached: save a checkpoint and build it anew")


# Libraries ask for PyTorch's class to find the module in a wrapper; its metaclass is `abc.ABCMeta`.
nn.parallel.DistributedDataParallel.register(FullyShardedDataParallel)


def _wanted(wrapper: "weakref.ref[FullyShardedDataParallel]") -> Callable[[bool], bool]:
    """Return what tells whether a backward pass is to be reduced; it does not keep the wrapper."""

    def wanted(was_expected: bool) -> bool:
        own = wrapper()
        return was_expected and own is not None and own.require_backward_grad_sync

    return wanted


def _units(built: UnitConstruction, trained: Sequence[Tensor]) -> list[Unit]:
    choice, index_of = built.choice, {param: index for index, param in enumerate(trained)}
    units = []
    for number, (name, some) in enumerate(zip(choice.names, built.claim.buckets, strict=True)):
        params = [param for bucket in some for param in bucket.params]
        has_frozen = any(param not in index_of for param in params)
        used = choice.modules[number].parameters() if has_frozen else params
        waits_for = frozenset(index_of[param] for param in used if param in index_of)
        units.append(Unit(number, name or OUTERMOST, some, waits_for, has_frozen))
    return units
