"""Scalers that leave a step to the optimizer: all ranks skip it, or none does.

Note [Infinities]
    ``torch.amp.GradScaler`` looks for infinities in this rank's gradients, and leaves out ``step()`` if it
    finds one. Where a gradient is whole on every rank, and reduced, each scaler finds the same. Where
    gradients are sharded, the scalers are told of each other as they look: Note [Infinities in sharded
    gradients] in `zero_optim.step.partial`. So the optimizer has no part in it, and who watches whether
    ``step()`` is called (accelerate does) or whether the optimizer handles scaling itself (Lightning does)
    sees what is true. Where no one reduces gradients before a scaler looks at them, ranks may find different
    things: PyTorch's ``ShardedGradScaler`` is for that.

    Inside ``Join`` other ranks wait for the step, and must hear that it is skipped. So there the optimizer
    says that it handles scaling itself, as fused ones do. The scaler then sets ``found_inf`` and
    ``grad_scale``, and calls ``step()`` in any case. Some scalers hand themselves to ``step()``. This module
    is for these two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import brought_to
from zero_optim.step.partial import PartialGradient
from zero_optim.step.words import Word, is_skipped_by_all


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What a scaler handed over for one step.

    Args:
        found_inf: 0-d, above zero if it found an infinity in this rank's gradients.
        scale: what the gradients have yet to be divided by; None if that has been done.
        scaler: to be told of an infinity on another rank; None if it set attributes of the optimizer.
    """

    found_inf: Tensor
    scale: Tensor | None
    scaler: torch.amp.GradScaler | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, handed_in: object) -> "Scaling | None":
        """Take what a scaler handed over, None if none is at work; neither communicates nor waits.

        Args:
            optimizer: whose step it is.
            handed_in: a scaler given to the step; None if there is none, or it has set attributes of the
                optimizer.

        Raises:
            TypeError: it is no ``torch.amp.GradScaler``.
        """
        if handed_in is not None:
            return cls(*_ask_scaler(handed_in, optimizer))
        found_inf, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
        if found_inf is None:
            return None
        return cls(found_inf, scale, None)

    @property
    def word(self) -> Word:
        """What the other ranks have to know beside what was found."""
        return Word.DEAF if self.scaler is None else Word.NOTHING

    def is_skipped(self, optimizer: torch.optim.Optimizer, words: Sequence[Word], rank: int) -> bool:
        """Tell whether the ranks skip the step, and let the scaler know if that is new to it.

        Its ``update()`` must back off as on the rank that found the infinity.

        Args:
            optimizer: whose step it is.
            words: of all ranks.
            rank: this one.

        Raises:
            RuntimeError: on every rank, a scaler cannot be told: its scale would drift from the others'.
        """
        if not is_skipped_by_all(words):
            return False
        if Word.INFINITE not in words[rank] and self.scaler is not None:
            for found in private.found_inf_per_device(self.scaler, optimizer).values():
                found.fill_(1.0)
        return True

    def unscale(self, params: Sequence[Tensor]) -> None:
        """Take the scale out of all gradients, if it is still in them; the CPU does not wait."""
        if self.scale is not None:
            _unscale(params, self.scale)


def drop_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Take off what a scaler set on the optimizer for a step that will raise; whether there was any.

    The scaler takes it off itself only after a step that does not raise.
    """
    is_scaled = "found_inf" in vars(optimizer)
    if is_scaled:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
    return is_scaled


@torch.no_grad()
def _unscale(params: Sequence[Tensor], scale: Tensor) -> None:
    """Divide all gradients by the scale, with the operation that ``GradScaler.unscale_`` uses."""
    inverse = scale.double().reciprocal().float()
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        grad = param.grad.piece if isinstance(param.grad, PartialGradient) else param.grad
        if grad is not None:
            # Not coalesced: that would make a copy. All entries of one element are divided alike.
            values = (private.values(grad) if grad.is_sparse else grad).detach()  # plain: nothing to agree on
            by_kind.setdefault((grad.device, grad.dtype), []).append(values)
    for (device, _), grads in by_kind.items():
        ignored = torch.zeros((), device=device)  # the infinities have been looked for already
        private.amp_foreach_non_finite_check_and_unscale_(grads, ignored, brought_to(inverse, device))


def _ask_scaler(
    scaler: object, optimizer: torch.optim.Optimizer
) -> tuple[Tensor, Tensor | None, torch.amp.GradScaler]:
    """Ask a scaler that was handed to ``step()`` what others set as attributes; does not communicate.

    Scalers that know an older agreement (FairScale's) hand themselves over as ``grad_scaler``.

    Args:
        scaler: a ``torch.amp.GradScaler``.
        optimizer: whose gradients it scaled.

    Returns:
        Whether it found an infinity, 0-d, above zero if so; the scale that the gradients still have, None
        if it has been taken out; and the scaler.

    Raises:
        TypeError: it is no such scaler.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"expected grad_scaler to be a torch.amp.GradScaler, got {type(scaler).__name__}")
    scaling = private.per_optimizer_states(scaler)[id(optimizer)]
    is_unscaled = scaling["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
    if not is_unscaled:
        private.check_inf_per_device(scaler, optimizer)
    flags = list(private.found_inf_per_device(scaler, optimizer).values())
    found = torch.zeros(()) if not flags else flags[0]
    for flag in flags[1:]:
        found = found + brought_to(flag, found.device)
    return found, None if is_unscaled else private.get_scale_async(scaler), scaler
