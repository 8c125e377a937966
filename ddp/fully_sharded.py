"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3)."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.ddp.assignment import ReducerOptions
from zero_optim.ddp.offload import Offload, keeping_for
from zero_optim.ddp.owner_reducer import Accumulate
from zero_optim.ddp.reducer import Reducer
from zero_optim.ddp.sharded import ShardedDataParallel
from zero_optim.ddp.unit_choice import UnitChoice, Units, choose_units
from zero_optim.ddp.unit_hooks import hook_up, units_of
from zero_optim.ddp.units import Unit, UnitsInUse
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
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
        offload: keeps what this rank owns in files, see `Offload`; on all ranks or none. The class must bear
            to be stepped some parameters at a time. None keeps it in memory.
        accumulate: as in `ShardedDataParallel`, as are the other options. ``mixed_precision`` is refused.

    Raises:
        TypeError: on every rank; as `ShardedDataParallel`, or ``units`` are none.
        ValueError: likewise; or a unit is no module of the model; or the budget of ``offload`` is too small.
        OSError: on the rank where the disk is too small for ``offload``; a `RemoteRankError` on the others.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        *,
        units: Units = "auto",
        reshard_after_forward: bool | int = True,
        accumulate: Accumulate = "owner",
        offload: Offload | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        """Check, agree with the other ranks, wrap, and free everything."""
        self._asked = units, reshard_after_forward, offload
        require_ours(optimizer)
        with failing_together(optimizer.ranks):
            _check(module, options)
        super().__init__(module, optimizer, accumulate=accumulate, **options)

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> Reducer:
        optimizer, (asked, reshards, offload) = self._optimizer, self._asked
        with failing_together(optimizer.ranks):
            choice = choose_units(self.module, asked)
            keeps = _num_kept(reshards)
            keeping = keeping_for(offload, choice.unit_of)
        owned = optimizer.pieces()
        buckets = optimizer.shard_parameters({p: n for p, n in choice.unit_of.items() if p in owned}, keeping)
        reducer = super()._make_reducer(pairs, options, sparse)
        lanes = lanes_for_rows(optimizer.ranks, owned)
        units = UnitsInUse(optimizer.ranks, lanes, _units(choice, buckets, reducer.params), keeps)
        hook_up(choice, units, {param: index for index, param in enumerate(reducer.params)})
        units.free_all()
        self.units = units
        return reducer

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


def _check(module: object, options: Mapping[str, object]) -> None:
    if options.get("mixed_precision") is not None:
        raise TypeError(
            "FullyShardedDataParallel takes no mixed_precision: convert the model, and build the optimizer "
            "with master_dtype=torch.float32, or use torch.autocast"
        )
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
