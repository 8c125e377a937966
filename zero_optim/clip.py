"""The global gradient norm, one for all ranks, and clipping by it.

Every parameter's norm is taken by its owner, from the gradient that the step will really use, and
the norms are then combined on every rank in the same order. So the result is equal on all ranks
even where gradients are not, and equal bit for bit to ``torch.nn.utils.clip_grad_norm_`` where they
are (several dtypes or devices aside: PyTorch combines those group by group, in no fixed order).
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.collectives import RankGroup


def global_grad_norm(
    group: RankGroup, params: Sequence[Tensor], owners: Sequence[int], norm_type: float, foreach: bool | None
) -> Tensor:
    """Compute the norm of all gradients as one vector; all ranks call; one small collective.

    Args:
        group: the ranks that own the parameters.
        params: every parameter, in the same order on every rank.
        owners: owner of each.
        norm_type: order of the norm: any number, ``inf`` included.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        A 0-d tensor on the first parameter's device, of the gradients' common dtype; zero if no
        owner has a gradient.
    """
    mine = [i for i, p in enumerate(params) if owners[i] == group.rank and p.grad is not None]
    norms = _norms([params[i].grad for i in mine], norm_type, foreach)
    packed = b"".join(struct.pack("<qd", i, norm) for i, norm in zip(mine, norms, strict=True))
    told = [pair for payload in group.all_gather_bytes(packed) for pair in struct.iter_unpack("<qd", payload)]
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
