"""The parts of a fully sharded model: its units, what gathers them, and the reducer of its gradients."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.comm.mesh import RankMesh
from zero_optim.compat import private
from zero_optim.ddp.full.construction import UnitConstruction
from zero_optim.ddp.full.unit import OUTERMOST, Unit
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.wrapper_checks import ignored_names, seen_params, sparse_names
from zero_optim.health.stamps import Call, Stamps
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.gathers import UnitGathers

_BUFFERS_AT_ONCE = 250 * 2**20  # bytes, as in PyTorch's DDP


def make_units(construction: UnitConstruction, trained: Sequence[Tensor]) -> list[Unit]:
    """Make the units, by number; `trained` are the parameters with gradients, in order."""
    choice, index_of = (
        construction.choice,
        {param: index for index, param in enumerate(trained) if param.requires_grad},
    )
    units = []
    for number, (name, some) in enumerate(zip(choice.names, construction.registration.buckets, strict=True)):
        params = [param for bucket in some for param in bucket.params]
        has_frozen = any(param not in index_of for param in params)
        used = choice.modules[number].parameters() if has_frozen else params
        waits_for = frozenset(index_of[param] for param in used if param in index_of)
        units.append(Unit(number, name or OUTERMOST, some, waits_for, has_frozen))
    return units


def make_reducer(
    construction: UnitConstruction,
    optimizer: ZeroRedundancyOptimizer,
    mesh: RankMesh | None,
    options: Mapping[str, Any],
    wanted: Callable[[bool], bool | None],
) -> OwnerReducer:
    """Make the reducer, with the wrapper's options; all ranks call, and it communicates."""
    pairs, with_sparse = seen_params(construction.module), sparse_names(construction.module)
    trained = [(name, param) for name, param in pairs if param.requires_grad]
    if not trained and construction.stands_in:  # only evaluated: a reducer that will never get a gradient
        trained = [(name, param) for name, param in pairs if param.is_floating_point()]
    reducer_options = ReducerOptions(
        bucket_caps_nbytes=(optimizer.core.sharding.cap_nbytes,),
        find_unused_parameters=bool(options.get("find_unused_parameters", False)),
        static_graph=bool(options.get("static_graph", False)),
        reduce_dtype=construction.policy.reduce_dtype,
        timeout=options.get("timeout"),
        on_stall=options.get("on_stall", "raise"),
    )
    frozen = [param for _, param in trained if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        return OwnerReducer(
            trained,
            optimizer,
            reducer_options,
            sparse=[name for name, _ in trained if name in with_sparse],
            wanted=wanted,
            mesh=mesh,
            outermost={param for param, number in construction.choice.unit_of.items() if not number},
        )
    finally:
        for param in frozen:
            param.requires_grad_(False)


def make_gathers(construction: UnitConstruction, optimizer: ZeroRedundancyOptimizer) -> UnitGathers:
    """Make the gathers of units; all ranks call, and it communicates."""
    ranks, params = optimizer.ranks, construction.registration.params
    names = [f"unit {name}" if name else OUTERMOST for name in construction.choice.names]
    named = zip(names, construction.registration.buckets, strict=True)
    labels = {bucket.params[0]: name for name, buckets in named for bucket in buckets}
    return UnitGathers(ranks, lanes_for_rows(ranks, params), _make_stamps(labels, optimizer))


def _make_stamps(labels: Mapping[Tensor, str], optimizer: ZeroRedundancyOptimizer) -> UnitStamps:
    """Make the stamps that gathers of units send; holds weak references only."""
    core = optimizer.core
    reference = weakref.ref(core)

    def call() -> Call:
        now = reference()
        return Call("", lambda _: ((), ())) if now is None else now.call("")

    stamps = core.engine.stamps or Stamps()  # the latter in a group of one
    return UnitStamps(labels, core.group, stamps, call)


def seen_buffers(module: nn.Module) -> list[Tensor]:
    """List the buffers of a module without ignored ones."""
    ignored = ignored_names(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


@torch.no_grad()
def send_buffers(module: nn.Module, reducer: OwnerReducer) -> None:
    """Give every rank the buffers of the first; all ranks call."""
    buffers = seen_buffers(module)
    if not buffers:
        return
    work = reducer.group.during("buffers").begin_work()
    with work.waiting(), private.unsafe_preserve_version_counter(tuple(buffers)):
        private.broadcast_coalesced(reducer.process_group, buffers, _BUFFERS_AT_ONCE, 0)
