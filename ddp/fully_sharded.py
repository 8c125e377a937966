"""`FullyShardedDataParallel`: parameters, gradients and state sharded, with plain tensors (ZeRO stage 3)."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import failing_together
from zero_optim.compat import private
from zero_optim.ddp.first_values import seen_buffers, send_buffers, take_values_of_first
from zero_optim.ddp.full.choice import Units
from zero_optim.ddp.full.construction import Arguments, construct
from zero_optim.ddp.full.filling import Init
from zero_optim.ddp.full.guards import explain_writes
from zero_optim.ddp.full.in_use import UnitsInUse, units_at
from zero_optim.ddp.full.precision import PrecisionPolicy
from zero_optim.ddp.full.sharded_state import load_local_state_dict, local_state
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.owners.sharded_module import NO_HOOK, Accumulate, ShardedModule, refusing
from zero_optim.ddp.reducer.graph import replaced
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.ddp.wrapper_checks import agree_on_model, frozen_params, ignored_names
from zero_optim.health.watchdog import unwatch
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours
from zero_optim.step.unreduced import FrozenParams


class FullyShardedDataParallel(ShardedModule, nn.Module):
    """Keep each parameter on its owners alone, and gather it while it is used (ZeRO stage 3).

    The optimizer is built before or after, and the loop stays as it is::

        model = FullyShardedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Parameters stay plain tensors, whole matrices if the class needs them. A *unit* is a module that is
    gathered before it is called and freed after it, and again in the backward pass, which reduces its
    gradients to their owners. The next unit is fetched meanwhile. At other times a parameter shows NaN, and a
    write to it raises: `unsharded` makes parameters whole to be read and written.

    Convert and move the model before it is wrapped: afterwards ``to()``, ``half()`` and the like raise if
    they would change a parameter.

    Bits are those of ``ShardedDataParallel`` with the same units. ``state_dict()`` is whole on every rank and
    ``load_state_dict()`` takes a whole one; both communicate, so all ranks call them.

    Args:
        module: the model to train.
        optimizer: has all parameters of the module that require a gradient; those it lacks stay whole on
            every rank. None if it is built later, over the wrapper's parameters, before the first backward
            pass: then no rank needs memory for more than the model and one unit.
        units: "auto", modules, classes of modules, or a function that says whether a module is a unit.
            Parameters in no unit belong to the outermost one, whole from the forward to the backward pass.
        reshard_after_forward: False keeps units whole from the forward to the backward pass: an iteration
            sends 2 (W-1)/W times the parameters' bytes, not 3. A number keeps so many, the last ones.
        guards_reads: the backward pass may come to a unit by a tensor that its modules did not return. Takes
            2 µs for each tensor that autograd saves. Use False if modules call ``torch.func.grad`` or
            ``torch.func.vjp``.
        offload: "cpu", for a model on an accelerator, keeps rows, gradients and state in pinned CPU memory,
            where the optimizer steps. None keeps them with the parameters.
        accumulate: as in `ShardedDataParallel`, as are the other options.
        process_group: that of the optimizer; if it comes later, None for the default group.
        mesh: as in `ShardedDataParallel`; units are gathered inside each replica.
        mixed_precision: a `PrecisionPolicy`, or a ``MixedPrecisionPolicy`` of FSDP2. Then ``param.dtype``
            is the dtype to compute with; owners keep and step the parameters in their own.
        device: for parameters and buffers on the meta device; None for the default one.
        init: called under ``torch.no_grad()`` with each module that has some there, children first, to set
            their first values; rank 0's are taken. None calls the module's ``reset_parameters()``. Wrap such
            a model without an optimizer; no rank ever holds the whole of it.

    Raises:
        TypeError: on every rank; as `ShardedDataParallel`, or ``units`` are none.
        ValueError: likewise; or a unit is no module of the model; ``mixed_precision`` or
            ``offload`` does not fit it; or a module on the meta device cannot be initialized.
    """

    units: UnitsInUse
    _reducer: OwnerReducer
    _stage = 3
    join_hook = refusing(
        "takes no part in Join: ranks that ran out of inputs would have to gather the units that the others "
        "use. Give every rank as many batches"
    )
    register_comm_hook = refusing(NO_HOOK)
    detach = refusing("cannot be detached: save a checkpoint and build it anew")  # no rank holds all of it

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | None = None,
        *,
        units: Units = "auto",
        reshard_after_forward: bool | int = True,
        guards_reads: bool = True,
        accumulate: Accumulate = "owner",
        offload: Literal["cpu"] | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        mixed_precision: PrecisionPolicy | object | None = None,
        device: torch.device | str | None = None,
        init: Init | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        super().__init__()
        private.require("FullyShardedDataParallel")
        explain_writes()
        how = units, reshard_after_forward, guards_reads, offload, mixed_precision, accumulate
        arguments = Arguments(*how, process_group, mesh, device, init, options)
        self._accumulate = accumulate
        self.require_backward_grad_sync = self._sends_buffers = True
        with ExitStack() as at_exit:
            if optimizer is not None:
                require_ours(optimizer)
                at_exit.enter_context(optimizer.ranks.doing("FullyShardedDataParallel()"))
            change = weakly(self._change_optimizer)
            self._construction, self._optimizer, self._mesh = construct(
                type(self), module, optimizer, arguments, change, at_exit
            )
            self._fill(module, arguments)

    def _fill(self, module: nn.Module, arguments: Arguments) -> None:
        """Send the first rank's values, keep what each rank owns, and wrap; all ranks call."""
        construction, everyone = self._construction, self._everyone
        described = {"module": module, "process_group": everyone.process_group, **arguments.options}
        agree_on_model(described, self, **arguments.limits, may_be_freed=True)
        construction.fill(self._optimizer, everyone)
        if arguments.syncs and arguments.sends_buffers:
            take_values_of_first(everyone.during("agree"), seen_buffers(module))
        construction.policy.cast_for_good(module, ignored_names(module))
        self.module = module
        frozen, sharded = frozen_params(module), construction.registration.params
        self._frozen = FrozenParams(frozen)
        self._versions = {param: -1 for _, param in frozen if param not in sharded}
        self.units = construction.make_units(weakly(self._before_forward), weakly(self._after_forward))
        self._use_optimizer()
        construction.hook_up(self.units)
        construction.registration.open(everyone if self._mesh else None, stands_in=construction.stands_in)

    def _own(self) -> OwnerReducer:
        return self._reducer

    def _use_optimizer(self) -> None:
        """Gather the optimizer's buckets, and launch the reducer's between gathers; all ranks call."""
        wanted, optimizer = weakly(self._wants), self._optimizer
        self._reducer = self._construction.make_reducer(optimizer, self._mesh, wanted, self.units)
        gathers = self._construction.make_gathers(optimizer)
        self.units.use(optimizer.core.engine, gathers, self._reducer)
        self._optimizer.core.begin_training(self._mesh)

    def _change_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer
        if self._mesh is not None:
            self._mesh = replace(self._mesh, inner=optimizer.ranks)
        self._reducer.close()
        unwatch(self._reducer)
        self._use_optimizer()

    def extra_repr(self) -> str:
        """Say what this rank holds; no communication."""
        is_open = self._construction.registration.is_open  # to one that comes later
        return f"no optimizer yet, ZeRO stage {self._stage}" if is_open else super().extra_repr()

    # ------------------------------------------------------------------ a forward pass

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the module, whose hooks do the rest."""
        return self.module(*inputs, **kwargs)

    def _before_forward(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - the user's
        """Begin a forward pass; called by the module's hook, as is `_after_forward`."""
        self._versions = {param: param._version for param in self._versions}
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._reducer.begin_forward()
        arguments = self._construction.arguments
        if self._sends_buffers and arguments.sends_buffers:
            send_buffers(self.module, self._reducer.group)
        if not arguments.options.get("device_ids"):
            return None
        device = self._reducer.params[0].device
        return replaced(args, lambda each: each.to(device)), replaced(kwargs, lambda each: each.to(device))

    def _after_forward(self, output: object) -> None:
        """Expect a backward pass; not called if the module has raised."""
        self._sends_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._versions and torch.is_grad_enabled():
            self._check_written()
        self._end_forward(output)

    def _check_written(self) -> None:
        """Raise RuntimeError if the forward pass wrote NaN into frozen parameters, as freed ones show it."""
        written = [param for param, version in self._versions.items() if param._version != version]
        firsts = [param.detach().flatten()[0].isnan() for param in written if param.numel()]
        if firsts and torch.stack(firsts).any():
            raise RuntimeError(
                "the forward pass wrote NaN into frozen parameters, as a momentum encoder does that reads "
                "weights of a unit that is not running: update it between passes, inside "
                "zero_optim.ddp.unsharded(module)"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:  # noqa: ANN401 - as there
        """Call ``optimizer.clip_grad_norm_``; all ranks call."""
        return self._optimizer.clip_grad_norm_(max_norm, norm_type, **options)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """All ranks that train the model."""
        return self._everyone.process_group

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a whole state dict, as ``nn.Module`` does; all ranks call. TypeError if it is no mapping."""
        with failing_together(self._everyone):
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"expected state_dict to be a mapping, got {type(state_dict).__name__}")
        return super().load_state_dict(state_dict, *args, **kwargs)

    def local_state_dict(self) -> dict[str, Any]:
        """Return what this rank has of the module's state dict; does not communicate.

        Of sharded parameters these are the rows that this rank owns, in the dtype that owners keep: by name,
        or as ``NAME[FIRST:LAST]`` if they are not all rows. The tensors share the model's memory.
        RuntimeError if parameters are whole for somebody to read or write.
        """
        return local_state(self.module, self.units)[0]

    def load_local_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `local_state_dict` returned on this rank, also in another run; all ranks call.

        The ranks must own the same rows: the same model, units, class and number of ranks. Otherwise, and for
        the optimizer's state, use `zero_optim.checkpoint`. Only errors are communicated.

        Raises:
            StateMismatchError: the dict has other names or shapes. This and what follows raises on every
                rank, and no parameter has changed.
            RuntimeError: parameters are whole for somebody to read or write.
            Exception: a module refuses its extra state; buffers have changed then.
        """
        load_local_state_dict(self.module, self.units, state_dict)


# Libraries ask for PyTorch's class to find the module in a wrapper; its metaclass is `abc.ABCMeta`.
nn.parallel.DistributedDataParallel.register(FullyShardedDataParallel)


def fully_shard(
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None = None,
    **options: Any,  # noqa: ANN401 - those of the wrapper
) -> nn.Module:
    """Keep each parameter of a module on its owners alone, as `FullyShardedDataParallel` does, in place.

    The module keeps its class, and the names in its state dict. Call it as before; all ranks do::

        fully_shard(model, units=[*model.blocks])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    `fully_sharded` gives the wrapper, with ``no_sync()``, ``metrics()``, ``units`` and ``check_finished()``.
    All ranks of the group call with the same arguments, those of the wrapper; it communicates.

    Returns:
        The module.

    Raises:
        ValueError: on every rank: the module, or a part of it, is fully sharded already.
        Exception: likewise, as `FullyShardedDataParallel`.
    """
    wrapper = FullyShardedDataParallel(module, optimizer, **options)
    wrapper.units.keep_alive(wrapper)
    return module


def fully_sharded(module: nn.Module) -> FullyShardedDataParallel:
    """Return the wrapper of a module that `fully_shard` sharded; ValueError if it did not."""
    units = units_at(module)
    if units is None or not isinstance(units.keepalive, FullyShardedDataParallel):
        raise ValueError(f"this {type(module).__name__} was not given to fully_shard()")
    return units.keepalive
