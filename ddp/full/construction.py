"""How the parameters of a model become those of units: who keeps them, and how they get there.

An optimizer makes the buckets of units: the one that comes first, which plans anew, or one that stands in for
a later one and never steps. One that comes first may have masters, which must be those of rank 0 when it
plans; so all values are sent before. Without one each module's are sent when it is filled.

Note [Optimizers that know nothing of units]
    An optimizer of PyTorch's may be built over freed parameters by mistake. Most steps would raise; a fused
    one would write to memory that is not the parameter's. So while there are fully sharded models, a hook of
    PyTorch's looks, before each step of any optimizer, at the first and the last parameter of each group.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_optim.comm.agreement import agreeing, failing_together, ranks_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.comm.mesh import RankMesh
from zero_optim.ddp.full.choice import Units, choose_units
from zero_optim.ddp.full.filling import (
    Init,
    UnitFiller,
    back_to_meta,
    check_init,
    has_meta,
    leave_meta,
    take_values_of_first,
)
from zero_optim.ddp.full.guards import refuse_conversions, refuse_shared_memory
from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.module_hooks import hook_up, units_of
from zero_optim.ddp.full.precision import PrecisionPolicy
from zero_optim.ddp.full.unit import OUTERMOST, Unit
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.ddp.wrapper_checks import (
    REFUSED,
    check_wrapping,
    seen_params,
    sparse_names,
)
from zero_optim.health.stamps import Stamps
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.gathers import UnitGathers
from zero_optim.shard.registration import Registration, is_registered
from zero_optim.shard.row_storage import storage_for
from zero_optim.shard.store import Store
from zero_optim.state.rebinding import shard_parameters

_PREFETCHES = "the next unit is always on its way while one is used; leave it out"
_IGNORES = "freeze these parameters and leave them out of the optimizer: they stay whole on every rank"
_OFFLOADS = 'offload="cpu" keeps what a rank owns on the CPU'
_TAKES_FIRST = "every rank takes the values of rank 0; leave it out"

# Options of PyTorch's wrappers that are not ours, each with what to do in its place.
OF_PYTORCH = {
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


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """Arguments of `FullyShardedDataParallel`, see there."""

    units: Units
    reshard_after_forward: bool | int
    guards_reads: bool
    offload: Literal["cpu"] | None
    precision: PrecisionPolicy | object | None
    accumulate: str
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    device: torch.device | str | None
    init: Init | None

    @property
    def num_kept(self) -> int | None:
        """How many units stay whole from the forward to the backward pass; None for all."""
        number: object = self.reshard_after_forward
        if isinstance(number, bool):
            return 0 if number else None
        if isinstance(number, int) and number >= 0:
            return number
        raise TypeError(
            f"expected reshard_after_forward to be True, False or a number of units, got {number!r}"
        )


class UnitConstruction:
    """The units of a model, from the choice of them until buckets hold their parameters."""

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        change_optimizer: Callable[[ZeroRedundancyOptimizer], None],
    ) -> None:
        if units_of(module) is not None:
            raise ValueError(
                "the model is fully sharded already, or a part of it: wrap the whole of it, once"
            )
        if any(map(is_registered, module.parameters())):
            raise ValueError(
                "some parameters are those of another fully sharded model, or of one whose wrapping broke "
                "off: put all modules into one, or build the model anew"
            )
        choice = choose_units(module, arguments.units)
        _ = arguments.num_kept  # raises if it is no number
        self.policy = PrecisionPolicy.of(arguments.precision, module) or PrecisionPolicy()
        check_init(module, arguments.init)
        place = torch.get_default_device() if arguments.device is None else torch.device(arguments.device)
        self._replaced = leave_meta(module, place)
        unit_of = {self._replaced.get(param, param): number for param, number in choice.unit_of.items()}
        self.choice = replace(choice, unit_of=unit_of)
        self.registration = Registration(len(choice.modules), change_optimizer)
        self.stands_in = self._is_filled = False
        self.module, self._arguments = module, arguments
        hook = register_optimizer_step_pre_hook(_refuse_others)
        weakref.finalize(self.registration, hook.remove).atexit = False

    def take(self, optimizer: ZeroRedundancyOptimizer | None) -> None:
        """Store the parameters that an optimizer has, None for all; does not communicate."""
        names = {param: name for name, param in seen_params(self.module)}
        owned = set(names) if optimizer is None else set(optimizer.pieces())
        units = {param: number for param, number in self.choice.unit_of.items() if param in owned}
        sharded = {param: name for param, name in names.items() if param in units}
        storage = storage_for(self._arguments.offload, self.choice.unit_of)
        self.policy.check(sharded, sparse_names(self.module), self._arguments.accumulate)
        self.registration.hold(Store(units, self.policy.compute_dtypes(sharded), storage))

    def stand_in(self, process_group: object, options: Mapping[str, object]) -> ZeroRedundancyOptimizer:
        """Build an optimizer that never steps, to hold the rows until one comes; all ranks call."""
        self.stands_in = True
        self.registration.mark()
        limits = {name: options[name] for name in ("timeout", "on_stall") if options.get(name) is not None}
        untyped: type = ZeroRedundancyOptimizer
        params = [*self.registration.params]
        cuts = not sparse_names(self.module)  # SGD bears them, so that rows are even
        optimizer: ZeroRedundancyOptimizer = untyped(
            params, torch.optim.SGD, process_group, lr=0.0, cuts=cuts, **limits
        )
        return optimizer

    def fill(self, optimizer: ZeroRedundancyOptimizer, everyone: RankGroup, *, syncs: bool) -> None:
        """Have each rank keep its rows, of rank 0's values if it `syncs`; free the parameters. All call."""
        group, core, former = everyone.during("agree"), optimizer.core, dict[Tensor, Bucket]()
        if not self.stands_in:
            if syncs:
                take_values_of_first(group, [param for _, param in seen_params(self.module)])
            with failing_together(everyone):  # it fails on all ranks of a replica alike
                optimizer.wait_for_gathers()
                buckets, units = shard_parameters(core, self.registration.store), self.registration.params
                former = {p: bucket for bucket in buckets for p in bucket.params if p in units}
                del buckets  # each goes when the last parameter of a unit is filled
            self.registration.mark()
            self.registration.place(core.engine.row_buckets, optimizer.ranks)
        self._is_filled = True
        unfilled, init = set(self._replaced.values()), self._arguments.init
        rows, syncs = core.engine.row_buckets, syncs and self.stands_in
        UnitFiller(group, self.choice, rows, unfilled, init, former, syncs=syncs).fill(self.module)
        core.owned.leaves.keep(rows)

    def make_units(self, trained: Sequence[Tensor]) -> list[Unit]:
        """Make the units, by number; ``trained`` are the parameters with gradients, in order."""
        index_of = {param: index for index, param in enumerate(trained) if param.requires_grad}
        units = []
        named = zip(self.choice.names, self.choice.modules, self.registration.buckets, strict=True)
        for number, (name, module, buckets) in enumerate(named):
            params = [param for bucket in buckets for param in bucket.params]
            has_frozen = any(param not in index_of for param in params)
            used = module.parameters() if has_frozen else params
            waits_for = frozenset(index_of[param] for param in used if param in index_of)
            units.append(Unit(number, name or OUTERMOST, buckets, waits_for, has_frozen))
        return units

    def make_reducer(
        self,
        optimizer: ZeroRedundancyOptimizer,
        mesh: RankMesh | None,
        options: Mapping[str, Any],
        wanted: Callable[[bool], bool | None],
    ) -> OwnerReducer:
        """Make the reducer, with the wrapper's options; all ranks call, and it communicates."""
        pairs, with_sparse = seen_params(self.module), sparse_names(self.module)
        trained = [(name, param) for name, param in pairs if param.requires_grad]
        if not trained and self.stands_in:  # only evaluated: a reducer that will never get a gradient
            trained = [(name, param) for name, param in pairs if param.is_floating_point()]
        reducer_options = ReducerOptions(
            bucket_caps_nbytes=(optimizer.core.sharding.cap_nbytes,),
            find_unused_parameters=bool(options.get("find_unused_parameters", False)),
            static_graph=bool(options.get("static_graph", False)),
            reduce_dtype=self.policy.reduce_dtype,
            timeout=options.get("timeout"),
            on_stall=options.get("on_stall", "raise"),
        )
        sparse = [name for name, _ in trained if name in with_sparse]
        outermost = {param for param, number in self.choice.unit_of.items() if not number}
        frozen = [param for _, param in trained if not param.requires_grad]
        try:
            for param in frozen:
                param.requires_grad_(True)
            return OwnerReducer(
                trained,
                optimizer,
                reducer_options,
                sparse=sparse,
                wanted=wanted,
                mesh=mesh,
                outermost=outermost,
            )
        finally:
            for param in frozen:
                param.requires_grad_(False)

    def make_gathers(self, optimizer: ZeroRedundancyOptimizer) -> UnitGathers:
        """Make the gathers of units; all ranks call, and it communicates."""
        ranks, core, registration = optimizer.ranks, optimizer.core, self.registration
        names = [f"unit {name}" if name else OUTERMOST for name in self.choice.names]
        named = zip(names, registration.buckets, strict=True)
        labels = {bucket.params[0]: name for name, buckets in named for bucket in buckets}
        lanes = lanes_for_rows(ranks, registration.params)
        stamps = core.engine.stamps or Stamps()  # the latter in a group of one
        return UnitGathers(ranks, lanes, UnitStamps(labels, core.group, stamps, weakly(core.call)))

    def hook_up(self, units: UnitsInUse) -> None:
        """Register the hooks of modules, and refuse conversions from now on."""
        self.policy.hook_up(self.choice.modules)
        hook_up(self.choice, units)
        refuse_conversions(self.module, self.registration.params)

    def give_up(self) -> None:
        """Leave the model as it was, if it was not filled; does not communicate."""
        if not self._is_filled:
            self.registration.unmark([*self.registration.params])
            back_to_meta(self.module, self._replaced)


def construct(
    wrapper: type,
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None,
    arguments: Arguments,
    options: Mapping[str, object],
    change_optimizer: Callable[[ZeroRedundancyOptimizer], None],
    at_exit: ExitStack,
) -> tuple[UnitConstruction, ZeroRedundancyOptimizer, RankMesh | None]:
    """Check a wrapper's arguments; return its units, not filled yet, an optimizer, and the mesh. All call."""
    mesh, process_group = arguments.mesh, arguments.process_group
    if optimizer is None:
        rank_mesh, groups = None, _ranks_to_be(mesh, process_group)
    else:
        rank_mesh = RankMesh.of(mesh, optimizer.ranks)
        groups = [optimizer.ranks if rank_mesh is None else rank_mesh.everyone]
    with _agreeing(groups, f"the arguments of {wrapper.__name__}") as items:
        check_wrapping(wrapper, module, optimizer, arguments.accumulate, process_group, options, OF_PYTORCH)
        if optimizer is not None and has_meta(module):
            raise ValueError(
                "a part of the model is on the meta device: wrap it without an optimizer, then build "
                "the optimizer with wrapped.parameters()"
            )
        construction = UnitConstruction(module, arguments, change_optimizer)
        at_exit.callback(construction.give_up)
        construction.take(optimizer)
        refuse_shared_memory(module, construction.registration.params)
        items += [
            f"mesh={mesh.mesh.tolist() if isinstance(mesh, DeviceMesh) else mesh!r}",
            f"accumulate={arguments.accumulate!r}",
            f"mixed_precision: {construction.policy.describe()}",
            f"offload={construction.registration.store.rows.description}",
        ]
    if optimizer is None:
        if process_group is None and isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            process_group = mesh.get_group(1)
        with _agreeing(groups, "the optimizer that holds the rows"):
            optimizer = construction.stand_in(process_group, options)
        rank_mesh = RankMesh.of(mesh, optimizer.ranks)
    return construction, optimizer, rank_mesh


def _ranks_to_be(mesh: object, process_group: object) -> list[RankGroup]:
    """Return the ranks of a wrapper before an optimizer has them; of a mesh its columns, then its rows."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        return [ranks_of(process_group)]
    if mesh.mesh.numel() == dist.get_world_size():
        return [ranks_of(None)]  # so that a rank without a mesh is heard too
    return [ranks_of(mesh.get_group(dim)) for dim in (0, 1)]


@contextmanager
def _agreeing(groups: Sequence[RankGroup], what: str) -> Iterator[list[str]]:
    """Do as `agreeing` in all groups, the last one first; yields the items."""
    items: list[str] = []
    with ExitStack() as stack:
        agreed = [stack.enter_context(agreeing(group, what)) for group in groups]
        yield items
        for each in agreed:
            each.items += items


def _refuse_others(optimizer: Optimizer, *_: object) -> None:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        params = group["params"]
        if params and (is_registered(params[0]) or is_registered(params[-1])):
            raise RuntimeError(
                f"{name} has parameters of a fully sharded model, which are on their owners alone: build "
                f"ZeroRedundancyOptimizer(wrapped.parameters(), {name}, ...)"
            )
