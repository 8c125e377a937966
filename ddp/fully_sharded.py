"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.ddp.assignment import ReducerOptions
from zero_optim.ddp.offload import Offload, keeping_for
from zero_optim.ddp.owner_reducer import Accumulate
from zero_optim.ddp.precision import PrecisionPolicy
from zero_optim.ddp.reducer import Reducer
from zero_optim.ddp.sharded import ShardedDataParallel
from zero_optim.ddp.unit_choice import UnitChoice, Units, choose_units
from zero_optim.ddp.unit_hooks import begin_anew, hook_up, units_of
from zero_optim.ddp.units import Unit, UnitsInUse
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.units import UnitBucket


class FullyShardedDataParallel(ShardedDataParallel):
    """Keep each parameter on its owners alone, and gather it while it is used (ZeRO stage 3).

    The optimizer is built first, and the loop stays as it is::

        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
        model = FullyShardedDataParallel(module, optimizer)

    The parameters stay plain tensors, whole matrices where the class needs that. A *unit*, a module, is
    gathered before it is called and freed after it, and again in the backward pass, where its gradients are
    reduced to their owners when all are there. Meanwhile the next unit is on its way. At other times a
    parameter shows NaN, and a write to it raises: `unsharded` makes parameters whole to be read and written.

    Bits are those of ``ShardedDataParallel`` with the same units. ``state_dict()`` is whole on every rank and
    ``load_state_dict()`` takes a whole one; both communicate, so all ranks call them.

    Args:
        module: what to train.
        optimizer: has all of its parameters that require a gradient. Parameters that it does not have
            stay whole on every rank.
        units: "auto", modules, or a function that tells of a module whether it is a unit. Parameters in no
            unit belong to the outermost one, which is whole from the forward to the backward pass.
        reshard_after_forward: False keeps units whole from the forward to the backward pass: 2 (W-1)/W times
            the parameters' bytes are sent in an iteration, and not 3. A number keeps so many, the last ones.
        guards_reads: let the backward pass come to a unit by a tensor that its modules kept aside, and did
            not return. Takes about 2 µs of the CPU for each tensor that autograd saves. False is needed where
            modules call ``torch.func.grad`` or ``torch.func.vjp``.
        offload: keeps what this rank owns in files, see `Offload`; on all ranks or none. The class must bear
            to be stepped some parameters at a time. None keeps it in memory.
        accumulate: as in `ShardedDataParallel`, as are ``mesh`` and the other options. With a mesh units are
            gathered inside each replica.
        mixed_precision: a `PrecisionPolicy`; or one of PyTorch's for its own wrappers. Then ``param.dtype``
            is the dtype to compute with, and owners keep and step the parameters as they were. None leaves
            all dtypes alone.

    Raises:
        TypeError: on every rank; as `ShardedDataParallel`, or ``units`` are none.
        ValueError: likewise; or a unit is no module of the model; or ``mixed_precision`` does not fit it; or
            the budget of ``offload`` is too small.
        OSError: on the rank where the disk is too small for ``offload``; a `RemoteRankError` on the others.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        *,
        units: Units = "auto",
        reshard_after_forward: bool | int = True,
        guards_reads: bool = True,
        accumulate: Accumulate = "owner",
        offload: Offload | None = None,
        mesh: DeviceMesh | None = None,
        mixed_precision: PrecisionPolicy | object | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        """Check, agree with the other ranks, wrap, and free everything."""
        self._asked = units, reshard_after_forward, guards_reads, offload
        self._asked_policy = mixed_precision
        super().__init__(module, optimizer, accumulate=accumulate, mesh=mesh, **options)

    def _check_more(self, module: nn.Module) -> list[str]:
        _check(module)
        self._policy = PrecisionPolicy.of(self._asked_policy, module) or PrecisionPolicy()
        return [f"mixed_precision: {self._policy.describe()}"]

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> Reducer:
        optimizer, (asked, reshards, guards, offload) = self._optimizer, self._asked
        everyone = self._everyone(optimizer)
        with failing_together(everyone):
            choice = choose_units(self.module, asked)
            keeps = _num_kept(reshards)
            keeping = keeping_for(offload, choice.unit_of)
            owned = optimizer.pieces()
            named = {p: name for name, p in self.module.named_parameters() if p in owned}
            self._policy.check(named, sparse, self._accumulate)
        dtypes = self._policy.compute_dtypes(named)
        with failing_together(everyone):  # it fails on all ranks of a replica alike
            buckets = optimizer.shard_parameters({p: choice.unit_of[p] for p in named}, dtypes, keeping)
        self._policy.cast_for_good(self.module, self.parameters_to_ignore)
        reducer = super()._make_reducer(
            pairs, replace(options, reduce_dtype=self._policy.reduce_dtype), sparse
        )
        lanes = lanes_for_rows(optimizer.ranks, owned)
        listed, stamps = _units(choice, buckets, reducer.params), optimizer.unit_stamps()
        units = UnitsInUse(optimizer.ranks, lanes, listed, keeps, stamps, guards_reads=guards)
        hook_up(choice, units, {param: index for index, param in enumerate(reducer.params)})
        self._policy.hook_up(choice.modules)
        units.free_all()
        self.units = units
        return reducer

    def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object:
        begin_anew(self.units)
        return super()._run_ddp_forward(*inputs, **kwargs)

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


def _num_kept(reshards: object) -> int | None:
    if isinstance(reshards, bool):
        return 0 if reshards else None
    if isinstance(reshards, int) and reshards >= 0:
        return reshards
    raise TypeError(
        f"expected reshard_after_forward to be True, False or a number of units, got {reshards!r}"
    )


def _units(choice: UnitChoice, buckets: Sequence[UnitBucket], trained: Sequence[Tensor]) -> list[Unit]:
    index_of = {param: index for index, param in enumerate(trained)}
    of_unit: list[list[UnitBucket]] = [[] for _ in choice.modules]
    for bucket in buckets:
        of_unit[choice.unit_of[bucket.params[0]]].append(bucket)
    units = []
    for number, (name, some) in enumerate(zip(choice.names, of_unit, strict=True)):
        params = [param for bucket in some for param in bucket.params]
        is_trained = all(param in index_of for param in params)
        waits_for = frozenset(index_of[param] for param in params) if is_trained else frozenset[int]()
        units.append(Unit(number, name or "the outermost unit", some, waits_for))
    return units
