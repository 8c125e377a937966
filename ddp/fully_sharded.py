"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3).

Note [No part in Join]
    A rank that ran out of inputs would have to start each gather that the others start, in their order: in
    forward and backward passes, passes without gradients among them, and with those of recomputed
    activations. Which ones these are is known when modules are called, on ranks that still have inputs. Two
    ways to tell were considered.

    The order of the pass before says which gather probably comes next. For a gather that is fetched early
    that is enough, as a unit that is not needed after all is freed. A rank that shadows has no calls to
    correct it. If the others call another unit, for a batch of another kind, their bytes meet those of a unit
    of another size. A rank without any batch has no order at all.

    Or the active ranks send the number of each unit before its gather: a collective more for each, in which
    time nothing can be fetched, in all iterations under ``Join``, for the sake of the last ones.

    So ``Join`` is refused. `zero_optim.ddp.ShardedDataParallel` takes part: in its forward pass nothing is
    gathered for a module, and what is reduced is the same in every pass.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.compat import private
from zero_optim.ddp.full.conversions import refuse_conversions
from zero_optim.ddp.full.fsdp_options import OF_FSDP
from zero_optim.ddp.full.offload import Offload, keeping_for
from zero_optim.ddp.full.unit import OUTERMOST, Unit
from zero_optim.ddp.full.unit_choice import UnitChoice, Units, choose_units
from zero_optim.ddp.full.unit_filling import Init, check_init, has_meta, leave_meta, take_values_of_first
from zero_optim.ddp.full.unit_hooks import begin_anew, hook_params, hook_up, units_of
from zero_optim.ddp.full.unit_making import Made
from zero_optim.ddp.full.unit_ranks import RanksToBe
from zero_optim.ddp.full.units import UnitsInUse
from zero_optim.ddp.owners.launch_places import LaunchPlaces
from zero_optim.ddp.owners.owner_reducer import Accumulate, OwnerReducer
from zero_optim.ddp.precision.precision import PrecisionPolicy, sparse_names
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.backward_pass import BackwardPass
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.ddp.sharded import ShardedDataParallel
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.claims import first_claim
from zero_optim.shard.unit_forms import UnitForms
from zero_optim.shard.unit_gathers import GathersFromOwners, GathersInReplicas, UnitGathers
from zero_optim.shard.unit_marks import UnitMarks
from zero_optim.shard.unit_stamps import UnitStamps
from zero_optim.shard.units import UnitBucket


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What the constructor was given, see there."""

    units: Units
    reshards: bool | int
    guards_reads: bool
    offload: Offload | Literal["cpu"] | None
    precision: PrecisionPolicy | object | None
    accumulate: str
    device: torch.device | str | None
    init: Init | None


class FullyShardedDataParallel(ShardedDataParallel):
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

    _refused = {**ShardedDataParallel._refused, **OF_FSDP}  # noqa: RUF012 - the base class's
    _may_split_state = True
    _may_be_freed = True
    units: UnitsInUse
    _policy: PrecisionPolicy
    _handles: list[RemovableHandle]

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
        mesh: DeviceMesh | None = None,
        mixed_precision: PrecisionPolicy | object | None = None,
        device: torch.device | str | None = None,
        init: Init | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        """Check, agree with the other ranks, wrap, and free everything."""
        private.require("FullyShardedDataParallel")
        self._asked = _Asked(
            units, reshard_after_forward, guards_reads, offload, mixed_precision, accumulate, device, init
        )
        self._made: Made | None = None
        try:
            stand_in = None if optimizer is not None else self._stand_in(module, mesh, options)
            untyped: Any = optimizer if stand_in is None else stand_in  # the base class checks what it is
            super().__init__(module, untyped, accumulate=accumulate, mesh=mesh, **options)
        except BaseException:
            made = vars(self).get("_made")  # nn.Module may not be set up yet
            if made is not None:
                made.give_up()
            raise
        claim = self._chosen.claim
        claim.is_open = stand_in is not None
        claim.everyone = None if self._mesh is None else self._mesh.everyone
        refuse_conversions(self.module, claim.units)

    @property
    def _chosen(self) -> Made:
        """The units."""
        assert self._made is not None  # they were chosen by the constructor
        return self._made

    def _stand_in(
        self, module: nn.Module, mesh: object, options: Mapping[str, object]
    ) -> ZeroRedundancyOptimizer:
        """Choose the units, and make an optimizer that keeps them until another one comes; all ranks call."""
        ranks = RanksToBe(mesh, options.get("process_group"))
        with ranks.failing_together():
            self._choose(module)
            made = self._chosen
            forms = self._forms_of(made.take(None), module)
        items = [f"mixed_precision: {self._policy.describe()}", f"offload={forms.describe()}"]
        ranks.agree(items, f"the arguments of {type(self).__name__}")
        with ranks.failing_together():
            optimizer = made.made_stand_in(ranks.process_group, forms, options)
        made.claim.told = weakly(self._change_optimizer)
        return optimizer

    def _forms_of(self, names: Mapping[Tensor, str], module: nn.Module) -> UnitForms:
        """Check how parameters are to be kept; does not communicate.

        Args:
            names: of those that are to be sharded.
            module: the model.
        """
        keeping = keeping_for(self._asked.offload, self._chosen.choice.unit_of)
        self._policy.check(names, sparse_names(module), self._asked.accumulate)
        return UnitForms(self._policy.compute_dtypes(names), keeping)

    def _choose(self, module: nn.Module) -> None:
        """Check what was asked for, and choose the units; does not communicate."""
        asked = self._asked
        _check(module)
        choice = choose_units(module, asked.units)
        self._keeps = _num_kept(asked.reshards)
        self._policy = PrecisionPolicy.of(asked.precision, module) or PrecisionPolicy()
        check_init(module, asked.init)
        place = torch.get_default_device() if asked.device is None else torch.device(asked.device)
        self._made = Made(choice, leave_meta(module, place), asked.init)

    def _check_more(self, module: nn.Module) -> list[str]:
        if self._made is None:
            if has_meta(module):
                raise ValueError(
                    "a part of the model is on the meta device: wrap it without an optimizer, then build the "
                    "optimizer with wrapped.parameters()"
                )
            self._choose(module)
        return [f"mixed_precision: {self._policy.describe()}"]

    def _prepared(self, module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Give every rank the values of the first, and keep what each owns of them; all ranks call."""
        optimizer, made, everyone = self._optimizer, self._chosen, self._everyone(self._optimizer)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        syncs = bool(options.get("init_sync", True))
        self._agree_on_model(module, process_group=everyone.process_group, **options)
        if made.stands_in:
            made.fill(optimizer, everyone, syncs=syncs)
        else:
            self._fill(module, ignored, syncs=syncs)
        if syncs and options.get("broadcast_buffers") is not False:
            named = ((name, each) for name, each in module.named_buffers() if name not in ignored)
            take_values_of_first(everyone.during("agree"), [buffer for _, buffer in named])
        self._policy.cast_for_good(module, ignored)
        return {**options, "init_sync": False}

    def _fill(self, module: nn.Module, ignored: Collection[str], *, syncs: bool) -> None:
        """Have the optimizer that was given keep its rows; all ranks call."""
        optimizer, made, everyone = self._optimizer, self._chosen, self._everyone(self._optimizer)
        named: dict[Tensor, str] = {p: n for n, p in module.named_parameters() if n not in ignored}
        with failing_together(everyone):
            forms = self._forms_of(made.take(optimizer), module)
        if syncs:
            take_values_of_first(everyone.during("agree"), named)
        with failing_together(everyone):  # it fails on all ranks of a replica alike
            made.placed(optimizer.shard_parameters(made.claim.units, forms), optimizer)

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> OwnerReducer:
        reducer = super()._make_reducer(
            pairs, replace(options, reduce_dtype=self._policy.reduce_dtype), sparse
        )
        optimizer, choice, claim = self._optimizer, self._chosen.choice, self._chosen.claim
        ranks, stamps = optimizer.ranks, optimizer.unit_stamps()
        gathers = self._unit_gathers(reducer, stamps)
        units = units_of(self.module)
        if units is None:
            made, guards = _units(choice, claim.buckets, reducer.params), self._asked.guards_reads
            self.units = units = UnitsInUse(ranks, gathers, made, self._keeps, stamps, guards_reads=guards)
            hook_up(choice, units)
            self._policy.hook_up(choice.modules)
        else:
            units.supply.use(ranks, gathers, stamps)
        units.places = reducer.places = self._launch_places(reducer, units)
        self._handles = hook_params(units, reducer.params)
        return reducer

    def _in_no_unit(self) -> Collection[Tensor]:
        return {param for param, number in self._chosen.choice.unit_of.items() if not number}

    def _launch_places(self, reducer: OwnerReducer, units: UnitsInUse) -> LaunchPlaces:
        """Make what holds buckets of gradients back."""
        found, unit_of = weakref.ref(reducer), self._chosen.choice.unit_of

        def running() -> BackwardPass | None:
            reducer = found()
            return None if reducer is None else reducer.running

        buckets = reducer.assignment.buckets
        return LaunchPlaces(units.units, [unit_of[bucket.params[0]] for bucket in buckets], running)

    def _unit_gathers(self, reducer: Reducer, stamps: UnitStamps) -> UnitGathers:
        """Choose how units are gathered; all ranks call, and it communicates."""
        ranks, mesh, claim = self._optimizer.ranks, self._mesh, self._chosen.claim
        names = [f"unit {name}" if name else OUTERMOST for name in self._chosen.choice.names]
        units = list(zip(names, claim.buckets, strict=True))
        if mesh is None or not mesh.splits_state:
            return GathersFromOwners(ranks, lanes_for_rows(ranks, claim.units), UnitMarks(units, ranks))
        inner, across = (
            lanes_for_rows(replace(part, phase=ranks.phase), claim.units)
            for part in (mesh.inner, mesh.across)
        )
        found = weakref.ref(reducer)

        def num_reduced() -> int:
            reducer = found()
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
        self._renew_reducer()

    def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object:
        begin_anew(self.units)
        return super()._run_ddp_forward(*inputs, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a whole state dict, as ``nn.Module`` does; all ranks call. Each unit is gathered for it.

        Raises:
            TypeError: on every rank: ``state_dict`` is no mapping on any. Nothing was loaded then.
        """
        with failing_together(self._everyone(self._optimizer)):
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

    def detach(self) -> NoReturn:
        """Refuse to let go of the process group: no rank holds the parameters.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("FullyShardedDataParallel cannot be detached: save a checkpoint and build it anew")


def _check(module: object) -> None:
    if isinstance(module, nn.Module) and units_of(module) is not None:
        raise ValueError("the model is fully sharded already, or a part of it: wrap the whole of it, once")
    if isinstance(module, nn.Module) and first_claim([*module.parameters()]) is not None:
        raise ValueError(
            "some parameters are those of another fully sharded model, or of one whose wrapping broke off: "
            "put all modules into one, or build the model anew"
        )


def _num_kept(reshards: object) -> int | None:
    if isinstance(reshards, bool):
        return 0 if reshards else None
    if isinstance(reshards, int) and reshards >= 0:
        return reshards
    raise TypeError(
        f"expected reshard_after_forward to be True, False or a number of units, got {reshards!r}"
    )


def _units(choice: UnitChoice, buckets: Sequence[list[UnitBucket]], trained: Sequence[Tensor]) -> list[Unit]:
    index_of = {param: index for index, param in enumerate(trained)}
    units = []
    for number, (name, some) in enumerate(zip(choice.names, buckets, strict=True)):
        params = [param for bucket in some for param in bucket.params]
        has_frozen = any(param not in index_of for param in params)
        used = choice.modules[number].parameters() if has_frozen else params
        waits_for = frozenset(index_of[param] for param in used if param in index_of)
        units.append(Unit(number, name or OUTERMOST, some, waits_for, has_frozen))
    return units
