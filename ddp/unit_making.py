"""How the parameters of a model come to be those of units: who keeps them, and how they get there.

Note [Optimizers that know nothing of units]
    An optimizer of PyTorch's may be built over freed parameters by mistake. Most steps would raise, as a
    freed parameter cannot be written to. A fused one would write to memory that is not the parameter's. So as
    long as there are fully sharded models a hook of PyTorch's looks at every optimizer before it steps: at
    the first and the last parameter of each group, which takes some microseconds.
"""

import weakref
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_optim.ddp.unit_choice import UnitChoice
from zero_optim.ddp.unit_filling import Init, UnitFiller
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.claims import UnitsClaim, claim_of
from zero_optim.shard.units import UnitBucket


class Made:
    """The units of a model, while they are made.

    Args:
        choice: which modules are units, and which parameters they have.
        replaced: parameters that had no values, each with the one in its place; see `leave_meta`.
        init: see `UnitFiller`.

    Attributes:
        choice: with the parameters as they are now.
        claim: what the parameters tell of their units.
    """

    def __init__(self, choice: UnitChoice, replaced: Mapping[Tensor, Tensor], init: Init | None) -> None:
        unit_of = {replaced.get(param, param): number for param, number in choice.unit_of.items()}
        self.choice = replace(choice, unit_of=unit_of)
        self.claim = UnitsClaim({}, len(choice.modules))
        hook = register_optimizer_step_pre_hook(_refuse_others)
        weakref.finalize(self.claim, hook.remove).atexit = False
        self._unfilled = set(replaced.values())
        self._init = init
        self._stands_in = False

    @property
    def stands_in(self) -> bool:
        """Whether an optimizer that is never stepped keeps the units."""
        return self._stands_in

    def take_from(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Take the parameters that an optimizer has, for their units; does not communicate."""
        owned = set(optimizer.pieces())
        unit_of = self.choice.unit_of
        self.claim.units = {param: number for param, number in unit_of.items() if param in owned}

    def placed(self, buckets: list[UnitBucket], optimizer: ZeroRedundancyOptimizer) -> None:
        """Have the parameters tell who keeps them."""
        self.claim.mark()
        self.claim.place(buckets, optimizer.ranks)

    def made_stand_in(self, options: Mapping[str, object]) -> ZeroRedundancyOptimizer:
        """Make an optimizer that is never stepped, and keeps all parameters until one comes for them.

        All ranks call, and it communicates.

        Args:
            options: of the wrapper.
        """
        model, unit_of = self.choice.modules[0], self.choice.unit_of
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        owned: set[Tensor] = {param for name, param in model.named_parameters() if name not in ignored}
        self.claim.units = {param: number for param, number in unit_of.items() if param in owned}
        self._stands_in = True
        self.claim.mark()
        names: tuple[str, ...] = ("process_group", "timeout", "on_stall")
        given = {name: options[name] for name in names if options.get(name) is not None}
        untyped: type = ZeroRedundancyOptimizer
        try:
            # A class that bears cuts, so that rows are even. It is never stepped.
            optimizer: ZeroRedundancyOptimizer = untyped(
                [*self.claim.units], torch.optim.SGD, lr=0.0, **given
            )
        except BaseException:
            self.claim.unmark([*self.claim.units])
            raise
        return optimizer

    def fill(self, optimizer: ZeroRedundancyOptimizer, *, syncs: bool) -> None:
        """Have this rank keep its rows, and free the parameters; all ranks call, and it communicates.

        Args:
            optimizer: what `made_stand_in` has given.
            syncs: take rank 0's values.
        """
        model, group = self.choice.modules[0], optimizer.ranks.during("agree")
        buckets = [bucket for of_unit in self.claim.buckets for bucket in of_unit]
        filler = UnitFiller(group, self.choice, buckets, self._unfilled, self._init, syncs=syncs)
        filler.fill(model)
        optimizer.keep_unit_rows()


def _refuse_others(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step, see Note [Optimizers that know nothing of units].

    Raises:
        RuntimeError: the optimizer has parameters of a fully sharded model, and is none of ours.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        params = group["params"]
        if params and claim_of((params[0], params[-1])) is not None:
            raise RuntimeError(
                f"{name} has parameters of a fully sharded model, which are on their owners alone: build "
                f"ZeroRedundancyOptimizer(wrapped.parameters(), {name}, ...)"
            )
