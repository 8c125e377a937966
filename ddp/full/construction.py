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
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_optim.comm.agreement import agree, failing_together, take_group
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.comm.mesh import RankMesh
from zero_optim.ddp.first_values import take_values_of_first
from zero_optim.ddp.full.choice import Units, choose_units
from zero_optim.ddp.full.filling import (
    Init,
    UnitFiller,
    back_to_meta,
    check_init,
    has_meta,
    leave_meta,
)
from zero_optim.ddp.full.guards import refuse_conversions, refuse_shared_memory
from zero_optim.ddp.full.in_use import UnitsInUse, units_of
from zero_optim.ddp.full.precision import PrecisionPolicy
from zero_optim.ddp.full.unit import OUTERMOST, Unit
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.inbox import Ties, weakly
from zero_optim.ddp.wrapper_checks import (
    REFUSED_FULLY,
    check_optimizer,
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
from zero_optim.shard.rows.row_storage import storage_for
from zero_optim.shard.store import Store
from zero_optim.state.rebinding import shard_parameters


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
    options: Mapping[str, Any]  # PyTorch's

    @property
    def syncs(self) -> bool:
        """Whether all ranks take the values of rank 0."""
        return bool(self.options.get("init_sync", True))

    @property
    def sends_buffers(self) -> bool:
        """Whether forward passes take the buffers of rank 0."""
        return self.options.get("broadcast_buffers") is not False

    @property
    def limits(self) -> dict[str, Any]:
        """The timeout, and what to do when a wait exceeds it."""
        return {"timeout": self.options.get("timeout"), "on_stall": self.options.get("on_stall", "raise")}

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
        optimizer: ZeroRedundancyOptimizer | None,  # has the parameters to store; None for all
        change_optimizer: Callable[[ZeroRedundancyOptimizer], None],
        at_exit: ExitStack,
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
        self.policy = PrecisionPolicy.of(arguments.precision)
        check_init(module, arguments.init)
        place = torch.get_default_device() if arguments.device is None else torch.device(arguments.device)
        self._replaced = leave_meta(module, place)
        unit_of = {self._replaced.get(param, param): number for param, number in choice.unit_of.items()}
        self.choice = replace(choice, unit_of=unit_of)
        self.module, self.arguments = module, arguments
        self.stands_in = self._is_filled = False
        self.registration = Registration(len(choice.modules), change_optimizer)
        at_exit.callback(self._give_up)
        hook = register_optimizer_step_pre_hook(_refuse_others)
        weakref.finalize(self.registration, hook.remove).atexit = False
        names = {param: name for name, param in seen_params(module)}
        owned = names if optimizer is None else optimizer.pieces()
        units = {param: number for param, number in unit_of.items() if param in owned}
        sharded = {param: name for param, name in names.items() if param in units}
        storage = storage_for(arguments.offload, unit_of)
        self.policy.check(sharded, sparse_names(module), arguments.accumulate)
        self.registration.hold(Store(units, self.policy.compute_dtypes(sharded), storage))
        refuse_shared_memory(module, units)

    def stand_in(self, process_group: object) -> ZeroRedundancyOptimizer:
        """Build an optimizer that never steps, to hold the rows until one comes; all ranks call."""
        self.stands_in = True
        self.registration.mark()
        cuts = not sparse_names(self.module)  # SGD bears them, so that rows are even
        params, untyped = [*self.registration.params], cast("Any", ZeroRedundancyOptimizer)
        limits = {name: limit for name, limit in self.arguments.limits.items() if limit is not None}
        optimizer: ZeroRedundancyOptimizer = untyped(
            params, torch.optim.SGD, process_group, lr=0.0, cuts=cuts, **limits
        )
        return optimizer

    def fill(self, optimizer: ZeroRedundancyOptimizer, everyone: RankGroup) -> None:
        """Have each rank keep its rows, and free the parameters; all ranks call. Communicates."""
        group, core, former = everyone.during("agree"), optimizer.core, dict[Tensor, Bucket[Any]]()
        syncs = self.arguments.syncs
        if not self.stands_in:
            if syncs:
                take_values_of_first(group, [param for _, param in seen_params(self.module)])
            with failing_together(everyone):  # it fails on all ranks of a replica alike
                optimizer.wait_for_gathers()
                buckets, units = shard_parameters(core, self.registration.store), self.registration.params
                in_place = [bucket for bucket in buckets if bucket.values.is_in_place]
                former = {p: bucket for bucket in in_place for p in bucket.params if p in units}
                del buckets, in_place  # each goes when the last parameter of a unit is filled
            self.registration.mark()
            self.registration.place(core.sharding.row_buckets, optimizer.ranks)
        self._is_filled = True
        unfilled, init = set(self._replaced.values()), self.arguments.init
        rows, syncs = core.sharding.row_buckets, syncs and self.stands_in
        UnitFiller(group, self.choice, rows, unfilled, init, former, syncs=syncs).fill()
        core.owned.leaves.keep(rows)

    def make_units(self, before: Callable[[Any, Any], Any], after: Callable[[object], None]) -> UnitsInUse:
        """Make the units; `hook_up` comes when nothing can fail any more."""
        trained = [param for _, param in seen_params(self.module) if param.requires_grad]
        index_of = {param: index for index, param in enumerate(trained)}
        units = []
        named = zip(self.choice.names, self.choice.modules, self.registration.buckets, strict=True)
        for number, (name, module, buckets) in enumerate(named):
            params = [param for bucket in buckets for param in bucket.params]
            has_frozen = any(param not in index_of for param in params)
            used = module.parameters() if has_frozen else params
            waits_for = frozenset(index_of[param] for param in used if param in index_of)
            units.append(Unit(number, name or OUTERMOST, buckets, waits_for, has_frozen))
        how = self.arguments
        return UnitsInUse(
            self.module, units, before, after, num_kept=how.num_kept, guards_reads=how.guards_reads
        )

    def hook_up(self, units: UnitsInUse) -> None:
        """Register all hooks on modules."""
        self.policy.hook_up(self.choice.modules)
        units.hook_up(self.choice)
        refuse_conversions(self.module, self.registration.params)

    def make_reducer(
        self,
        optimizer: ZeroRedundancyOptimizer,
        mesh: RankMesh | None,
        wanted: Callable[[bool], bool | None],
        units: UnitsInUse,
    ) -> OwnerReducer:
        """Make the reducer, with the wrapper's options; all ranks call, and it communicates."""
        options = self.arguments.options
        pairs, with_sparse = seen_params(self.module), sparse_names(self.module)
        trained = [(name, param) for name, param in pairs if param.requires_grad]
        if not trained and self.stands_in:  # only evaluated: a reducer that will never get a gradient
            trained = [(name, param) for name, param in pairs if param.is_floating_point()]
        reducer_options = ReducerOptions(
            find_unused_parameters=bool(options.get("find_unused_parameters", False)),
            static_graph=bool(options.get("static_graph", False)),
            reduce_dtype=self.policy.reduce_dtype,
            **self.arguments.limits,
        )
        sparse = [name for name, _ in trained if name in with_sparse]
        follow, begin = weakly(units.backward.gradient_came), weakly(units.backward.begin)
        outermost = frozenset(units.units[0].params)
        ties = Ties(optimizer.core.engine, wanted, follow=follow, begin=begin, last=outermost)
        return OwnerReducer(trained, optimizer, reducer_options, ties, sparse=sparse, mesh=mesh)

    def make_gathers(self, optimizer: ZeroRedundancyOptimizer) -> UnitGathers:
        """Make the gathers of units; all ranks call, and it communicates."""
        ranks, core, registration = optimizer.ranks, optimizer.core, self.registration
        names = [f"unit {name}" if name else OUTERMOST for name in self.choice.names]
        named = zip(names, registration.buckets, strict=True)
        labels = {bucket.params[0]: name for name, buckets in named for bucket in buckets}
        lanes = lanes_for_rows(ranks, registration.params)
        stamps = core.engine.stamps or Stamps()  # the latter in a group of one
        return UnitGathers(ranks, lanes, UnitStamps(labels, core.group, stamps, weakly(core.call)))

    def _give_up(self) -> None:
        """Leave the model as it was, if it was not filled; does not communicate."""
        if not self._is_filled:
            self.registration.unmark([*self.registration.params])
            back_to_meta(self.module, self._replaced)


def construct(
    wrapper: type,
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None,
    arguments: Arguments,
    change_optimizer: Callable[[ZeroRedundancyOptimizer], None],
    at_exit: ExitStack,
) -> tuple[UnitConstruction, ZeroRedundancyOptimizer, RankMesh | None]:
    """Check a wrapper's arguments; return its units, not filled yet, an optimizer, and the mesh. All call."""
    mesh, process_group = arguments.mesh, arguments.process_group
    if optimizer is None:
        rank_mesh, groups = None, _ranks_to_be(mesh, process_group)
    else:
        rank_mesh = RankMesh.make(mesh, optimizer.ranks)
        groups = [optimizer.ranks if rank_mesh is None else rank_mesh.everyone]
    with _failing_in(groups):
        check_wrapping(wrapper, module, arguments.accumulate, arguments.options, REFUSED_FULLY)
        if optimizer is not None:
            check_optimizer(module, optimizer, process_group)
            if has_meta(module):
                raise ValueError(
                    "a part of the model is on the meta device: wrap it without an optimizer, then build "
                    "the optimizer with wrapped.parameters()"
                )
        construction = UnitConstruction(module, arguments, optimizer, change_optimizer, at_exit)
    items = [
        f"mesh={mesh.mesh.tolist() if isinstance(mesh, DeviceMesh) else mesh!r}",
        f"accumulate={arguments.accumulate!r}",
        f"mixed_precision: {construction.policy.describe()}",
        f"offload={construction.registration.store.rows.description}",
    ]
    for group in groups:
        with _failing_in(groups):
            agree(group, items, f"the arguments of {wrapper.__name__}")
    if optimizer is None:
        if process_group is None and isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            process_group = mesh.get_group(1)
        with _failing_in(groups):
            optimizer = construction.stand_in(process_group)
        rank_mesh = RankMesh.make(mesh, optimizer.ranks)
    return construction, optimizer, rank_mesh


def _ranks_to_be(mesh: object, process_group: object) -> list[RankGroup]:
    """Return the ranks of a wrapper before an optimizer has them; of a mesh its columns, then its rows."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        return [take_group(process_group)]
    if mesh.mesh.numel() == dist.get_world_size():
        return [take_group(None)]  # so that a rank without a mesh is heard too
    return [take_group(mesh.get_group(dim)) for dim in (0, 1)]


@contextmanager
def _failing_in(groups: Sequence[RankGroup]) -> Iterator[None]:
    """Do as `failing_together` in all groups, the last one first."""
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(failing_together(group))
        yield


def _refuse_others(optimizer: Optimizer, *_: object) -> None:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        params = group["params"]
        if params and (is_registered(params[0]) or is_registered(params[-1])):
            raise RuntimeError(
                f"{name} has parameters of a fully sharded model, of which each rank keeps a part: build "
                f"ZeroRedundancyOptimizer(wrapped.parameters(), {name}, ...)"
            )
