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

from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.full.unit_choice import UnitChoice
from zero_optim.ddp.full.unit_filling import Init, UnitFiller, back_to_meta
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.claims import UnitsClaim, claim_of
from zero_optim.shard.unit_forms import UnitForms
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
        self._replaced = replaced
        self._unfilled = set(replaced.values())
        self._init = init
        self._stands_in = self._is_filled = False

    @property
    def stands_in(self) -> bool:
        """Whether an optimizer that is never stepped keeps the units."""
        return self._stands_in

    def take(self, optimizer: ZeroRedundancyOptimizer | None) -> dict[Tensor, str]:
        """Take the parameters that an optimizer has, for their units; does not communicate.

        Args:
            optimizer: the optimizer; None takes all that are not to be ignored.

        Returns:
            Their names, but for those to be ignored.
        """
        model, unit_of = self.choice.modules[0], self.choice.unit_of
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        named: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if name not in ignored}
        owned = set(named) if optimizer is None else set(optimizer.pieces())
        self.claim.units = {param: number for param, number in unit_of.items() if param in owned}
        return {param: name for param, name in named.items() if param in self.claim.units}

    def placed(self, buckets: list[UnitBucket], optimizer: ZeroRedundancyOptimizer) -> None:
        """Have the parameters tell who keeps them."""
        self._is_filled = True
        self.claim.mark()
        self.claim.place(buckets, optimizer.ranks)

    def made_stand_in(
        self, process_group: object, forms: UnitForms, options: Mapping[str, object]
    ) -> ZeroRedundancyOptimizer:
        """Make an optimizer that is never stepped, and keeps all parameters until one comes for them.

        All ranks call, after `take`, and it communicates.

        Args:
            process_group: its ranks; None for the default group.
            forms: how it keeps them.
            options: of the wrapper.
        """
        self._stands_in = True
        self.claim.forms = forms
        self.claim.mark()
        names: tuple[str, ...] = ("timeout", "on_stall")
        given = {name: options[name] for name in names if options.get(name) is not None}
        untyped: type = ZeroRedundancyOptimizer
        # A class that bears cuts, so that rows are even. It is never stepped.
        optimizer: ZeroRedundancyOptimizer = untyped(
            [*self.claim.units], torch.optim.SGD, process_group, lr=0.0, **given
        )
        return optimizer

    def give_up(self) -> None:
        """Leave the model as it was, if it was not filled yet; does not communicate."""
        if self._is_filled:
            return
        self.claim.unmark([*self.claim.units])
        back_to_meta(self.choice.modules[0], self._replaced)

    def fill(self, optimizer: ZeroRedundancyOptimizer, everyone: RankGroup, *, syncs: bool) -> None:
        """Have this rank keep its rows, and free the parameters; all ranks call, and it communicates.

        Args:
            optimizer: what `made_stand_in` has given.
            everyone: all ranks, those of all replicas.
            syncs: take rank 0's values.
        """
        self._is_filled = True
        model, group = self.choice.modules[0], everyone.during("agree")
        buckets = [bucket for of_unit in self.claim.buckets for bucket in of_unit]
        filler = UnitFiller(group, self.choice, buckets, self._unfilled, self._init, syncs=syncs)
        filler.fill(model)
        optimizer.core.keep_unit_rows()


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
