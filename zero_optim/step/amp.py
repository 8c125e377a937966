"""``torch.amp.GradScaler``: all ranks skip a step, or none does, and all come to the same scale.

A scaler looks for infinities in this rank's gradients and decides for this rank alone. Where one
rank finds one and another does not, the first would skip the step that the second waits in. So the
optimizer tells the scaler that it handles scaling itself (as fused optimizers do): the scaler then
hands over the scale and what it found, and the ranks decide together.
"""

import inspect
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup


def skips_together(
    group: RankGroup, optimizer: torch.optim.Optimizer, scaler: object, params: Sequence[Tensor]
) -> bool:
    """Decide with the other ranks whether a scaled step is skipped; unscale if it is not; all ranks call.

    Communicates only if a scaler is at work: one collective of a byte.

    Args:
        group: the ranks.
        optimizer: whose step it is.
        scaler: one that handed itself in; None if there is none, or it has set attributes of ``optimizer``.
        params: every parameter.

    Raises:
        TypeError: ``scaler`` is no ``torch.amp.GradScaler``.
        RuntimeError: another rank found an infinity, and the scaler here cannot be told.
    """
    if scaler is None:
        found_inf, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
    else:
        found_inf, scale = _ask_scaler(scaler, optimizer)
    if found_inf is None:
        return False
    if _agree_on_infinity(group, found_inf):
        if not found_inf.item():
            _tell_scaler(optimizer, scaler)
        return True
    if scale is not None:
        _unscale(params, scale)
    return False


def drop_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Take off what a scaler set on the optimizer for a step that will raise; whether there was any.

    The scaler takes it off itself only after a step that does not raise.
    """
    is_scaled = "found_inf" in vars(optimizer)
    if is_scaled:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
    return is_scaled


def _agree_on_infinity(group: RankGroup, found_inf: Tensor) -> bool:
    """Tell whether any rank's scaler found an infinity; all ranks call; one collective of a byte."""
    flags = group.all_gather_fixed(b"\1" if bool(found_inf.item()) else b"\0")
    return any(flag != b"\0" for flag in flags)


@torch.no_grad()
def _unscale(params: Sequence[Tensor], scale: Tensor) -> None:
    """Divide all gradients by the scale, with the operation that ``GradScaler.unscale_`` uses."""
    inverse = scale.double().reciprocal().float()
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grad = param.grad.coalesce()._values() if param.grad.is_sparse else param.grad
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in by_kind.items():
        ignored = torch.zeros((), device=device)  # the infinities have been looked for already
        torch._amp_foreach_non_finite_check_and_unscale_(grads, ignored, inverse.to(device))


def _ask_scaler(scaler: object, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor | None]:
    """Ask a scaler that was handed to ``step()`` what others set as attributes; does not communicate.

    Scalers that know an older agreement (FairScale's) hand themselves over as ``grad_scaler``.

    Args:
        scaler: a ``torch.amp.GradScaler``.
        optimizer: whose gradients it scaled.

    Returns:
        Whether it found an infinity, 0-d, above zero if so; and the scale that the gradients still have, None
        if it has been taken out.

    Raises:
        TypeError: it is no such scaler.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"expected grad_scaler to be a torch.amp.GradScaler, got {type(scaler).__name__}")
    scaling = scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = scaling["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
    if not is_unscaled:
        scaler._check_inf_per_device(optimizer)
    flags = [flag.cpu() for flag in scaler._found_inf_per_device(optimizer).values()]
    found = torch.stack(flags).sum() if flags else torch.zeros(())
    return found, None if is_unscaled else scaler._get_scale_async()


def _tell_scaler(optimizer: torch.optim.Optimizer, scaler: object = None) -> None:
    """Let the scaler that is stepping ``optimizer`` know of an infinity on another rank.

    Its ``update()`` must back off as on that rank. A scaler does not hand itself over (the argument
    for that is deprecated), so it is looked up among the callers; its record of this optimizer is
    what its own check fills.

    Args:
        optimizer: the one stepped.
        scaler: the scaler, if it did hand itself over.

    Raises:
        RuntimeError: no scaler is among the callers, so its scale would drift from the other ranks'.
    """
    if scaler is None:
        scaler = _calling_scaler(inspect.currentframe())
    if not isinstance(scaler, torch.amp.GradScaler):
        raise RuntimeError(  # noqa: TRY004 - not the caller's doing
            "another rank found an infinite gradient, and the scaler to tell is not a torch.amp.GradScaler"
        )
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)


def _calling_scaler(frame: FrameType | None) -> torch.amp.GradScaler | None:
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.amp.GradScaler):
            return candidate
        frame = frame.f_back
    return None
