"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.arguments import ranks_of
from zero_optim.comm.lanes import lanes_for_rows
from zero_optim.ddp.assignment import ReducerOptions
from zero_optim.ddp.inbox import weakly
from zero_optim.ddp.owner_reducer import Accumulate
from zero_optim.ddp.reducer import Reducer
from zero_optim.ddp.sharded import ShardedDataParallel
from zero_optim.ddp.unit_choice import UnitChoice, Units, choose_units
from zero_optim.ddp.unit_filling import Init, check_init, has_meta, leave_meta, take_values_of_first
from zero_optim.ddp.unit_hooks import hook_params, hook_up, units_of
from zero_optim.ddp.unit_making import Made
from zero_optim.ddp.units import Unit, UnitsInUse
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.shard.units import UnitBucket


class FullyShardedDataParallel(ShardedDataParallel):
    """Keep each parameter on its owners alone, and gather it while it is used (ZeRO stage 3).

    The optimizer is built before or after, and the loop stays as it is::

        model = FullyShardedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    The parameters stay plain tensors, whole matrices where the class needs that. A *unit*, a module, is
    gathered before it is called and freed after it, and again in the backward pass, where its gradients are
    reduced to their owners when all are there. Meanwhile the next unit is on its way. At other times a
    parameter shows NaN, and a write to it raises: `unsharded` makes parameters whole to be read and written.

    Bits are those of ``ShardedDataParallel`` with the same units. ``state_dict()`` is whole on every rank and
    ``load_state_dict()`` takes a whole one; both communicate, so all ranks call them.

    Args:
        module: what to train.
        optimizer: has all of its parameters that require a gradient. Parameters that it does not have
            stay whole on every rank. None if it is built later, over the wrapper's parameters, before the
            first backward pass: then no rank needs memory for more than the model and one unit.
        units: "auto", modules, or a function that tells of a module whether it is a unit. Parameters in no
            unit belong to the outermost one, which is whole from the forward to the backward pass.
        reshard_after_forward: False keeps units whole from the forward to the backward pass: 2 (W-1)/W times
            the parameters' bytes are sent in an iteration, and not 3. A number keeps so many, the last ones.
        device: where parameters and buffers that are on the meta device are to be; None for the default one.
        init: called with each module that has some there, under ``torch.no_grad()``, to give them their first
            values; None for the module's own ``reset_parameters()``. Modules come after those below them.
            Each rank calls it, and takes the values of rank 0. A model on the meta device is wrapped without
            an optimizer, and no rank ever holds the whole of it.
        accumulate: as in `ShardedDataParallel`, as are the other options. ``mixed_precision`` is refused.

    Raises:
        TypeError: on every rank; as `ShardedDataParallel`, or ``units`` are none.
        ValueError: likewise; or a unit is no module of the model; or a module on the meta device cannot be
            initialized, or was not.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | None = None,
        *,
        units: Units = "auto",
        reshard_after_forward: bool | int = True,
        accumulate: Accumulate = "owner",
        device: torch.device | str | None = None,
        init: Init | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        """Check, agree with the other ranks, wrap, and free everything."""
        if optimizer is not None:
            require_ours(optimizer)
        given = optimizer
        ranks = ranks_of(options.get("process_group")) if given is None else given.ranks
        with failing_together(ranks):
            _check(module, options)
            choice = choose_units(module, units)
            self._keeps = _num_kept(reshard_after_forward)
            place = torch.get_default_device() if device is None else torch.device(device)
            check_init(module, init)
            if given is not None and has_meta(module):
                raise ValueError(
                    "a part of the model is on the meta device: wrap it without an optimizer, then build the "
                    "optimizer with wrapped.parameters()"
                )
        self._made = Made(choice, leave_meta(module, place), init)
        claim, optimizer = self._made.claimed(given, options)
        claim.told = weakly(self._change_optimizer)
        super().__init__(module, optimizer, accumulate=accumulate, **options)
        claim.is_open = given is None

    def _prepared(self, module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Give every rank the values of rank 0, and keep what each owns of them; all ranks call."""
        syncs = bool(options.get("init_sync", True))
        if syncs:
            self._agree_on_model(module, process_group=self._optimizer.ranks.process_group, **options)
        self._made.fill(self._optimizer, syncs=syncs)
        if syncs and options.get("broadcast_buffers") is not False:
            take_values_of_first(self._optimizer.ranks.during("agree"), module.buffers())
        return {**options, "init_sync": False}

    def _refuse_freed(self, module: nn.Module) -> None:
        """Refuse nothing: `_check` has, and what is on the meta device is filled later."""

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> Reducer:
        reducer = super()._make_reducer(pairs, options, sparse)
        ranks = self._optimizer.ranks
        choice, claim = self._made.choice, self._made.claim
        lanes = lanes_for_rows(ranks, claim.units)
        units = units_of(self.module)
        if units is None:
            made = _units(choice, claim.buckets, reducer.params)
            self.units = units = UnitsInUse(ranks, lanes, made, self._keeps)
            hook_up(choice, units)
        else:
            units.use(ranks, lanes)
        self._handles = hook_params(units, choice.unit_of, reducer.params)
        return reducer

    def _change_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Reduce gradients for an optimizer that has come later; all ranks call, and it communicates."""
        self._optimizer = optimizer
        for handle in self._handles:
            handle.remove()
        self._renew_reducer()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        """Refuse to convert or move parameters that are not here: ``to()``, ``half()``, ``cuda()`` call this.

        Raises:
            RuntimeError: parameters of units would get another dtype or device, or other memory.
        """
        for bucket in (bucket for unit in self.units.units for bucket in unit.buckets):
            probe = torch.zeros(1, dtype=bucket.row.dtype, device=bucket.device)
            if fn(probe) is not probe:
                raise RuntimeError(
                    "the parameters of a fully sharded model are on their owners alone, and cannot be "
                    "converted or moved: do that before wrapping. For a model on the meta device give device="
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

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


def _units(choice: UnitChoice, buckets: Sequence[list[UnitBucket]], trained: Sequence[Tensor]) -> list[Unit]:
    index_of = {param: index for index, param in enumerate(trained)}
    units = []
    for number, (name, some) in enumerate(zip(choice.names, buckets, strict=True)):
        params = [param for bucket in some for param in bucket.params]
        is_trained = all(param in index_of for param in params)
        waits_for = frozenset(index_of[param] for param in params) if is_trained else frozenset[int]()
        units.append(Unit(number, name or "the outermost unit", some, waits_for))
    return units
