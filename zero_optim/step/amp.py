"""Gradient scalers that let the optimizer skip a step: all ranks skip it, or none.

Note [Infinities]
    ``torch.amp.GradScaler`` leaves out ``step()`` by itself: all scalers see equal gradients, or are informed
    (Note [Infinities in sharded gradients] in `zero_optim.step.partial`). But inside ``Join`` other ranks
    must hear of a skipped step: there the scaler sets ``found_inf`` and ``grad_scale`` and calls ``step()``.
    And some pass themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import to_device
from zero_optim.step.join import Status, ranks_that
from zero_optim.step.partial import PartialGradient


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A scaler's values for one step; ``scaler`` is None if it set attributes of the optimizer."""

    found_inf: Tensor
    scale: Tensor | None
    scaler: torch.amp.GradScaler | None

    @classmethod
    def read(cls, optimizer: torch.optim.Optimizer, scaler: object) -> "Scaling | None":
        """Read the scaler passed to ``step()``, or the optimizer's attributes; None without. No wait."""
        if scaler is None:
            found_inf, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
            return None if found_inf is None else cls(found_inf, scale, None)
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"expected grad_scaler to be a torch.amp.GradScaler, got {type(scaler).__name__}")
        stage = private.per_optimizer_states(scaler)[id(optimizer)]["stage"]
        is_unscaled = stage is torch.amp.grad_scaler.OptState.UNSCALED
        if not is_unscaled:
            private.check_inf_per_device(scaler, optimizer)
        flags = list(private.found_inf_per_device(scaler, optimizer).values())
        found_inf = torch.zeros((), device="cpu") if not flags else flags[0]
        for flag in flags[1:]:
            found_inf = found_inf + to_device(flag, found_inf.device)
        return cls(found_inf, None if is_unscaled else private.get_scale_async(scaler), scaler)

    def back_off_together(
        self, optimizer: torch.optim.Optimizer, statuses: Sequence[Status], rank: int
    ) -> bool:
        """Make this rank's scaler back off if any found an infinity; return whether all skip the step."""
        if not ranks_that(statuses, Status.INFINITE):
            return False
        if Status.INFINITE not in statuses[rank] and self.scaler is not None:
            for found in private.found_inf_per_device(self.scaler, optimizer).values():
                found.fill_(1.0)
        return True

    @torch.no_grad()
    def unscale(self, params: Sequence[Tensor]) -> None:
        """Divide the gradients by the scale, if not done already; the CPU does not wait."""
        if self.scale is None:
            return
        inverse = self.scale.double().reciprocal().float()
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in params:
            grad = param.grad.piece if isinstance(param.grad, PartialGradient) else param.grad
            if grad is not None:
                # Not coalesced: that would copy. All entries of one element are divided alike.
                values = private.values(grad) if grad.is_sparse else grad
                by_kind.setdefault((grad.device, grad.dtype), []).append(values.detach())  # plain tensors
        for (device, _), grads in by_kind.items():
            ignored = torch.zeros((), device=device)  # the infinities have been looked for already
            private.amp_foreach_non_finite_check_and_unscale_(grads, ignored, to_device(inverse, device))


def drop_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Remove a scaler's attributes before ``step()`` raises; return whether there were any."""
    found_inf, _ = (vars(optimizer).pop(name, None) for name in ("found_inf", "grad_scale"))
    return found_inf is not None
