"""A fully sharded model can be converted and moved until its first forward pass.

See Note [Converted when it is used] in `zero_optim.ddp.conversions`.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle

from zero_optim.comm.agreement import agree
from zero_optim.compat.engine import eager
from zero_optim.ddp.conversions import Conversions
from zero_optim.ddp.inbox import weakly
from zero_optim.ddp.precision import PrecisionPolicy, sparse_names
from zero_optim.ddp.sharded import ShardedDataParallel
from zero_optim.ddp.units import UnitsInUse
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.claims import UnitsClaim
from zero_optim.shard.units import UnitBucket

_HINTS = dict.fromkeys(
    ("parameter", "buffer"), "Convert and move the model on all ranks alike, before its first forward pass"
)


class ConvertibleWrapper(ShardedDataParallel):
    """A wrapper of a model with units, whose subclass makes these."""

    units: UnitsInUse
    _claim: UnitsClaim
    _policy: PrecisionPolicy
    _handles: list[RemovableHandle]

    def _allow_conversions(self, claim: UnitsClaim, policy: PrecisionPolicy) -> None:
        """Let the model be converted, until its first forward pass; does not communicate.

        Args:
            claim: the units.
            policy: how they are computed with.
        """
        self._claim = claim
        found = weakref.ref(self)

        def check(name: str, dtype: torch.dtype, device: torch.device) -> None:
            wrapper = found()
            if wrapper is not None:
                wrapper._check_conversion(name, dtype, device)

        def why_not() -> str | None:
            wrapper = found()
            age = 0 if wrapper is None else wrapper._optimizer.age
            return f"the optimizer has taken {age} steps or loads" if age else None

        module = self.module
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())

        def cast_rest() -> None:
            policy.cast_for_good(module, ignored)

        settle = weakly(self._settle)
        conversions = Conversions(module, claim, policy.compute_dtype, check, why_not, cast_rest, settle)
        conversions.hook_up()
        self.units.conversions = conversions
        claim.settle = self._optimizer.on_use = settle

    def _check_conversion(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse a parameter of another dtype or device if it does not go with what was given.

        Raises:
            ValueError: it does not.
        """
        like = torch.empty(0, dtype=dtype, device="meta")
        self._policy.check({like: name}, sparse_names(self.module), self._accumulate)
        known = next(iter(self._claim.units)).device
        keeping = self._claim.forms.keeping
        if device != known and (self._mesh is not None or keeping is not None):
            what = "a mesh" if keeping is None else "offload"
            raise ValueError(f"with {what} a model must be where it is to be trained before it is wrapped")

    def _settle(self) -> None:
        """Have the owners keep what the model was converted to; all ranks call, and it communicates.

        Raises:
            RankMismatchError: on every rank: the model was converted differently.
        """
        conversions, optimizer, claim = self.units.conversions, self._optimizer, self._claim
        if conversions is None:
            return
        everyone = self._everyone(optimizer)
        agree(everyone.during("agree"), [*conversions.describe()], "what the model was converted to", _HINTS)
        if not conversions.pending:
            return
        forms = replace(claim.forms, compute_dtypes=conversions.compute_dtypes()).anew()

        def fill(buckets: Sequence[UnitBucket]) -> None:
            claim.fill_converted(buckets, conversions.converted)

        with claim.failing_together():
            buckets = optimizer.renew_units(forms, fill)
        conversions.pending.clear()
        claim.forms = forms
        claim.place(buckets, optimizer.ranks)
        self.device = next(iter(claim.units)).device  # PyTorch's class notes it in its constructor
        self.device_type = self.device.type
        self._change_optimizer(optimizer)

    def _change_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Reduce gradients for an optimizer that has come later; all ranks call, and it communicates."""
        self._optimizer = optimizer
        conversions = self.units.conversions
        optimizer.on_use = None if conversions is None else conversions.on_use
        if self._mesh is not None:
            self._mesh = self._mesh.owned_by(optimizer.ranks)
            optimizer.mesh = self._mesh.of_owners
        for handle in self._handles:
            handle.remove()
        self._renew_reducer()

    def _pre_forward(self, *inputs: object, **kwargs: object) -> object:
        self._begin_pass()  # before buffers are sent
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @eager
    def _begin_pass(self) -> None:
        if self.units.conversions is not None:
            self.units.settle(in_pass=True)
            self._optimizer.on_use = self._claim.settle = None
