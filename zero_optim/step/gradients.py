"""Which gradient a rank steps a parameter with: the rows of it that the rank owns.

Nothing here communicates. Whoever needs the gradient of an owned parameter asks `owned_gradient`.
"""

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.step.partial import PartialGradient


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Take a piece's rows out of a tensor with the shape of the parameter; all of it is the tensor itself.

    Args:
        tensor: dense, or sparse in the layout COO. On an asynchronous device the CPU waits for a sparse one.
        piece: of the parameter.

    Returns:
        A view of a dense tensor. Of a sparse one those entries that lie in the rows, in their order, with
        the indices counted from the first row; they are as coalesced as they were.
    """
    if is_whole(piece, tensor.shape):
        return tensor
    if not tensor.is_sparse:
        return tensor[piece.start : piece.stop]
    indices, values = private.indices(tensor), private.values(tensor)
    inside = (indices[0] >= piece.start) & (indices[0] < piece.stop)
    kept = indices[:, inside]
    kept[0] -= piece.start
    return _sparse(tensor, kept, values[inside], piece.stop - piece.start)


def is_sparse(grad: Tensor | None) -> bool:
    """Whether the gradient of a parameter is sparse, also where another rank holds it."""
    return grad is not None and (grad.is_sparse or (isinstance(grad, PartialGradient) and grad.is_of_sparse))


def owned_gradient(param: Tensor, piece: Piece) -> Tensor | None:
    """Give the gradient that a rank steps its piece of a parameter with; None if there is none.

    Args:
        param: the parameter.
        piece: of it, which this rank owns.

    Returns:
        `rows_of` the parameter's gradient; what a partial one holds.
    """
    if isinstance(param.grad, PartialGradient):
        return param.grad.piece
    return None if param.grad is None else rows_of(param.grad, piece)


@torch.no_grad()
def set_owned_gradient(param: Tensor, piece: Piece, rows: Tensor | None) -> None:
    """Set the gradient that `owned_gradient` gives. The other rows are no gradient of anything afterwards.

    A dense gradient that exists is written to in place, as it may be a view of DDP's.

    Args:
        param: the parameter.
        piece: of it, which this rank owns.
        rows: on any device, of the shape of the piece; None for no gradient.
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
    """Make a sparse tensor with another number of rows, as coalesced as some other one."""
    shape = (rows, *like.shape[1:])
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=like.is_coalesced(), check_invariants=False
    )
