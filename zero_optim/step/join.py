"""Uneven inputs: a rank without data still steps what it owns while others train.

An active rank sends a joined one, for one step, the options and the gradients of the rows it owns. Ranks
exchange status bytes before a step inside ``Join`` or with scaled gradients.
"""

from collections.abc import Sequence
from enum import IntFlag

import torch
from torch import Tensor

from zero_optim.comm.agreement import Ballot, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.compat.streams import HostCopy
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import Piece, Pieces, is_whole, piece_of, rows_of


class Status(IntFlag):
    """Flags of one rank."""

    NOTHING = 0
    JOINED = 1  # it ran out of inputs
    INFINITE = 2  # its scaler found an infinity
    DEAF = 4  # if another rank finds one, its scaler cannot be told


def exchange(
    group: RankGroup, status: Status, *, found_inf: Tensor | None = None, failure: Exception | None = None
) -> list[Status]:
    """Exchange status bytes, `Status.INFINITE` by ``found_inf``; all ranks call, and raise what any has."""

    def mine() -> bytes:
        is_infinite = found_inf is not None and group.read(HostCopy(found_inf)).item() != 0
        return bytes([status | Status.INFINITE if is_infinite else status])

    with Ballot(group, mine) as ballot:
        if failure is not None:
            raise failure
    statuses = [Status(each[0]) for each in ballot.payloads]
    infinite = ranks_that(statuses, Status.INFINITE)
    deaf = sorted({*ranks_that(statuses, Status.DEAF)} - {*infinite})
    if infinite and deaf:
        raise RuntimeError(
            f"the scalers of ranks {infinite} found an infinite gradient, those of ranks {deaf} did not, and "
            "would go on with another scale: reduce gradients before a scaler looks at them, as DDP does"
        )
    return statuses


def ranks_that(statuses: Sequence[Status], flag: Status) -> list[int]:
    """Return the ranks with a flag."""
    return [rank for rank, status in enumerate(statuses) if flag in status]


def lend_gradients(
    group: RankGroup,
    statuses: Sequence[Status],
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    groups: list[ParamGroup],
) -> None:
    """Send joined ranks options, and gradients of their rows, from the lowest active one; all ranks call."""
    have_joined = ranks_that(statuses, Status.JOINED)
    if len(have_joined) in (0, group.size):
        return
    lender = next(rank for rank in range(group.size) if rank not in have_joined)
    parcels, received = [], None
    with failing_together(group):
        if group.rank == lender:
            options = {"options": [options_of(each) for each in groups]}
            for to in have_joined:
                taken = zip(params, (piece_of(of_param, to) for of_param in pieces), strict=True)
                grads = {
                    index: rows_of(param.grad, piece)
                    for index, (param, piece) in enumerate(taken)
                    if piece is not None and param.grad is not None
                }
                parcels.append((to, *encode({"grads": grads, **options}, "a gradient or option")))
    for to, skeleton, tensors in parcels:
        send_value(group, [to], skeleton, tensors)
    if group.rank in have_joined:
        received = recv_encoded(group, lender)
    with failing_together(group):  # a gradient may be of a tensor subclass that is not imported here
        if received is None:
            return
        skeleton, tensors = received
        parcel = decode(skeleton, iter(tensors))
        for own, options in zip(groups, parcel["options"], strict=True):
            own.update(options)
        for index, (param, of_param) in enumerate(zip(params, pieces, strict=True)):
            piece = piece_of(of_param, group.rank)
            if piece is not None:
                _set_rows(param, piece, parcel["grads"].get(index))


@torch.no_grad()
def _set_rows(param: Tensor, piece: Piece, rows: Tensor | None) -> None:
    """Set the rows of a gradient in place, as it may be a view of DDP's, or None; others become undefined."""
    is_new = param.grad is None or param.grad.is_sparse
    if rows is None or rows.is_sparse or (is_new and is_whole(piece, param.shape)):
        param.grad = None if rows is None else rows.to(param.device)
        return
    grad = param.grad = torch.zeros_like(param) if is_new or param.grad is None else param.grad
    rows_of(grad, piece).copy_(rows)
