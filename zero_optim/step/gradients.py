"""The rows of a gradient that a rank steps. No communication."""

import torch
from torch import Tensor

from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.step.partial import PartialGradient


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """View a piece's rows of a dense tensor with the parameter's shape; the tensor itself if that is all."""
    return tensor if is_whole(piece, tensor.shape) else tensor[piece.start : piece.stop]


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
    elif rows.is_sparse:  # of a parameter that is whole
        param.grad = rows.to(param.device)
    elif param.grad is None or param.grad.is_sparse:
        if is_whole(piece, param.shape):
            param.grad = rows.to(param.device)
        else:
            param.grad = torch.zeros_like(param)
            rows_of(param.grad, piece).copy_(rows)
    else:
        rows_of(param.grad, piece).copy_(rows)
