"""Gradient scalers that let the optimizer skip a step: all ranks skip it, or none.

Note [Infinities]
    ``torch.amp.GradScaler`` leaves out ``step()`` by itself: all scalers see equal gradients, or are informed
    (Note [Infinities in sharded gradients] in `zero_optim.step.partial`). But inside ``Join`` other ranks
    must hear of a skipped step: there the scaler sets ``found_inf`` and ``grad_scale`` and calls ``step()``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import to_device
from zero_optim.step.partial import PartialGradient


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A scaler's values for one step, which it set as attributes of the optimizer."""

    found_inf: Tensor
    scale: Tensor | None

    @classmethod
    def read(cls, optimizer: torch.optim.Optimizer) -> "Scaling | None":
        """Read the optimizer's attributes; None without. No wait."""
        found_inf, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
        return None if found_inf is None else cls(found_inf, scale)

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
