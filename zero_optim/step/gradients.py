"""The rows of a gradient that a rank steps. No communication."""

import torch
from torch import Tensor

from zero_optim.plan.pieces import Piece, is_whole


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """View a piece's rows of a dense tensor with the parameter's shape; the tensor itself if that is all."""
    return tensor if is_whole(piece, tensor.shape) else tensor[piece.start : piece.stop]


@torch.no_grad()
def set_owned_gradient(param: Tensor, piece: Piece, rows: Tensor | None) -> None:
    """Set the rows of a gradient in place, as it may be a view of DDP's, or None; others become undefined."""
    is_new = param.grad is None or param.grad.is_sparse
    if rows is None or rows.is_sparse or (is_new and is_whole(piece, param.shape)):
        param.grad = None if rows is None else rows.to(param.device)
        return
    grad = param.grad = torch.zeros_like(param) if is_new or param.grad is None else param.grad
    rows_of(grad, piece).copy_(rows)
