"""The rows of a gradient that a rank steps. No communication."""

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.step.partial import PartialGradient


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece's rows of a tensor with the parameter's shape; the tensor itself if that is all.

    A view if dense. If sparse (COO): its entries in these rows, in order, with indices from the first row;
    coalesced if it was. An accelerator then makes the CPU wait.
    """
    if is_whole(piece, tensor.shape):
        return tensor
    if not tensor.is_sparse:
        return tensor[piece.start : piece.stop]
    indices, values = private.indices(tensor), private.values(tensor)
    inside = (indices[0] >= piece.start) & (indices[0] < piece.stop)
    indices_inside = indices[:, inside]
    indices_inside[0] -= piece.start
    return _sparse(tensor, indices_inside, values[inside], piece.stop - piece.start)


def is_sparse(grad: Tensor | None) -> bool:
    """Return whether a gradient is sparse, even if another rank holds it."""
    return grad is not None and (grad.is_sparse or (isinstance(grad, PartialGradient) and grad.is_of_sparse))


def owned_gradient(param: Tensor, piece: Piece) -> Tensor | None:
    """Return this rank's rows of a whole or partial gradient."""
    if isinstance(param.grad, PartialGradient):
        return param.grad.piece
    return None if param.grad is None else rows_of(param.grad, piece)


@torch.no_grad()
def set_owned_gradient(param: Tensor, piece: Piece, rows: Tensor | None) -> None:
    """Set the gradient of `owned_gradient`, or None; other rows become undefined.

    Writes to a dense gradient in place: it may be a view of DDP's. ``rows`` may be on any device.
    """
    if rows is None:
        param.grad = None
    elif rows.is_sparse:
        rows = rows.to(param.device)
        if not is_whole(piece, param.shape):
            indices = private.indices(rows).clone()
            indices[0] += piece.start
            rows = _sparse(rows, indices, private.values(rows), param.shape[0])
        param.grad = rows
    elif param.grad is None or param.grad.is_sparse:
        if is_whole(piece, param.shape):
            param.grad = rows.to(param.device)
        else:
            param.grad = torch.zeros_like(param)
            rows_of(param.grad, piece).copy_(rows)
    else:
        rows_of(param.grad, piece).copy_(rows)


def _sparse(like: Tensor, indices: Tensor, values: Tensor, rows: int) -> Tensor:
    shape = (rows, *like.shape[1:])
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=like.is_coalesced(), check_invariants=False
    )
