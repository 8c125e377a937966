"""The global gradient norm, one for all ranks, and clipping by it.

Every parameter's norm is taken by its owner, from the gradient that the step will really use, and
the norms are then combined on every rank in the same order. So the result is equal on all ranks
even where gradients are not, and equal bit for bit to ``torch.nn.utils.clip_grad_norm_`` where they
are (several dtypes or devices aside: PyTorch combines those group by group, in no fixed order).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.comm.agreement import gather_together
from zero_optim.comm.arguments import check_flags
from zero_optim.comm.collectives import RankGroup, ranks_text
from zero_optim.errors import RankMismatchError
from zero_optim.plan.description import describe


@dataclass(frozen=True, slots=True)
class ClipArguments:
    """What ``clip_grad_norm_`` was called with on this rank; not checked yet, see there."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    foreach: bool | None

    def check(self) -> float:
        """Refuse what is of the wrong kind, and give the order of the norm.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: one is not a number.
        """
        check_flags(error_if_nonfinite=self.error_if_nonfinite)
        if self.foreach is not None:
            check_flags(foreach=self.foreach)
        _number("max_norm", self.max_norm)
        return _number("norm_type", self.norm_type)

    def __str__(self) -> str:
        return (
            f"max_norm={describe(self.max_norm)}, norm_type={describe(self.norm_type)}, "
            f"error_if_nonfinite={self.error_if_nonfinite}, foreach={self.foreach}"
        )


def _number(name: str, value: object) -> float:
    # PyTorch takes the order as a text too: "inf".
    is_right = isinstance(value, int | float | str) if name == "norm_type" else not isinstance(value, str)
    try:
        number = float(value) if is_right else None  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    if math.isnan(number):
        raise ValueError(f"expected {name} to be a number, got {value!r}")
    return number


def clip_together(
    group: RankGroup, params: Sequence[Tensor], owners: Sequence[int], asked: ClipArguments
) -> Tensor:
    """Scale all gradients down, if their norm as one vector is above what was asked for; all ranks call.

    Communicates: one small collective.

    Args:
        group: the ranks that own the parameters.
        params: every parameter, in the same order on every rank.
        owners: owner of each.
        asked: the arguments, which are checked and compared here.

    Returns:
        The norm before clipping, see `global_grad_norm`, whose errors are raised too.

    Raises:
        RuntimeError: on every rank, the norm is not finite and that was not to be.
    """
    norm = global_grad_norm(group, params, owners, asked)
    if asked.error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {asked.norm_type} of all gradients is {norm.item()}: they cannot be clipped. "
            "Leave out error_if_nonfinite to scale them all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(params, asked.max_norm, norm, asked.foreach)
    return norm


def global_grad_norm(
    group: RankGroup, params: Sequence[Tensor], owners: Sequence[int], asked: ClipArguments
) -> Tensor:
    """Compute the norm of all gradients as one vector; all ranks call; one small collective.

    Args:
        group: the ranks that own the parameters.
        params: every parameter, in the same order on every rank.
        owners: owner of each.
        asked: the arguments, which are checked and compared here.

    Returns:
        A 0-d tensor on the first parameter's device, of the gradients' common dtype; zero if no
        owner has a gradient.

    Raises:
        RankMismatchError: on every rank, when ranks gave different arguments.
        TypeError: likewise, when an argument is of the wrong kind on any; or ValueError.
    """

    def arguments_and_norms() -> bytes:
        mine = [i for i, p in enumerate(params) if owners[i] == group.rank and p.grad is not None]
        norms = _norms([params[i].grad for i in mine], asked.check(), asked.foreach)
        arguments = str(asked).encode()
        packed = (struct.pack("<qd", i, norm) for i, norm in zip(mine, norms, strict=True))
        return b"".join([struct.pack("<q", len(arguments)), arguments, *packed])

    told: list[tuple[int, float]] = []
    arguments: list[str] = []
    for payload in gather_together(group, arguments_and_norms):
        start = 8 + int.from_bytes(payload[:8], "little")
        arguments.append(payload[8:start].decode())
        told += struct.iter_unpack("<qd", payload[start:])
    if len(set(arguments)) > 1:
        held = {given: [r for r, other in enumerate(arguments) if other == given] for given in arguments}
        text = "; ".join(f"{ranks_text(ranks)} has {given}" for given, ranks in held.items())
        raise RankMismatchError(f"ranks disagree about the arguments of clip_grad_norm_: {text}")
    norm_type = asked.check()
    told.sort()
    if not told:
        return torch.tensor(0.0)
    # A float64 holds every float of the gradients' dtypes exactly, so the trip changes no bit.
    stacked = torch.stack([torch.tensor(norm, dtype=_norm_dtype(params[i])) for i, norm in told])
    norm: Tensor = torch.linalg.vector_norm(stacked.to(params[0].device), norm_type)
    return norm


def _norms(grads: Sequence[Tensor | None], norm_type: float, foreach: bool | None) -> list[float]:
    """Take the norm of each gradient, as ``torch.nn.utils`` does."""
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
    if foreach is False:
        return [float(torch.linalg.vector_norm(grad, norm_type)) for grad in dense]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(dense):
        by_kind.setdefault((grad.device, grad.dtype), []).append(index)
    norms = [0.0] * len(dense)
    for indices in by_kind.values():
        together = torch._foreach_norm([dense[index] for index in indices], norm_type)
        for index, norm in zip(indices, torch.stack(list(together)).tolist(), strict=True):
            norms[index] = norm
    return norms


def _norm_dtype(param: Tensor) -> torch.dtype:
    """Norms of complex gradients are real."""
    return param.dtype.to_real() if param.dtype.is_complex else param.dtype
