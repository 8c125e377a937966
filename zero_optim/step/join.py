"""Uneven inputs: what a rank that ran out of data does while the others still step.

A rank that has joined owns parameters still, so each step needs it: it steps them and takes part in
the gathers. But it computes no gradients any more, and PyTorch's DDP does not give it the reduced
ones either. So one rank that is still active lends it the gradients of what it owns (of a cut
parameter, the rows), and the options (the learning rate goes on changing where schedulers run). The
result is, bit for bit, that of the active ranks stepping an unsharded optimizer.

When the step is over, what was lent is gone: a loop that calls ``zero_grad()`` at the end of an iteration
goes on with what it left, in the next epoch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.plan.pieces import Pieces, piece_of
from zero_optim.step.gradients import owned_gradient, set_owned_gradient
from zero_optim.step.partial import PartialGradient
from zero_optim.step.words import Word, exchange, ranks_that


@dataclass(slots=True, eq=False)
class JoinNotes:
    """What an optimizer has to remember inside ``Join``.

    Attributes:
        is_announced: ``Join`` has been told that this rank is active in this iteration.
        given: parameters whose gradients came with a backward pass that this rank shadowed.
    """

    is_announced: bool = False
    given: list[Tensor] = field(default_factory=list)

    @contextmanager
    def borrowing(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Have the gradients of other ranks in the body, on a rank that has joined; does not communicate.

        Afterwards those are gone that were not there before. The others are zeros, in place, as they may be
        views of DDP's: they were zeros before, or are old, and the loop drops them before it uses them.
        """
        given = set(self.given)
        held = {param for param in params if param.grad is not None and param not in given}
        try:
            yield
        finally:
            self.given = []
            with torch.no_grad():
                for param in {*params, *given}:
                    if param.grad is not None and param in held:
                        param.grad.zero_()
                    else:
                        param.grad = None


class ShadowHook(JoinHook):
    """Answers each step of the active ranks, which must step once an iteration.

    Args:
        shadow: takes part in one step.
    """

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Shadow one iteration; ``Join`` calls it while some rank is still active."""
        self._shadow()


def lend_gradients(
    group: RankGroup,
    joined: bool,
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    groups: list[ParamGroup],
    *,
    failure: Exception | None = None,
) -> None:
    """Give ranks that have joined the gradients and options they need; all ranks call each step.

    One collective of a byte while all are active; else the lowest active rank sends to each joined
    rank the gradients of what that rank owns.

    Args:
        group: all ranks, joined or active.
        joined: whether this rank has joined.
        params: every parameter; a joined rank's gradients are overwritten.
        pieces: who owns which rows of each.
        groups: public groups; a joined rank's options are overwritten.
        failure: why this rank cannot step.

    Raises:
        Exception: on every rank, the failure of any.
    """
    words = exchange(group, Word.JOINED if joined else Word.NOTHING, failure=failure)
    lend_to(group, ranks_that(words, Word.JOINED), params, pieces, groups)


def lend_to(
    group: RankGroup,
    have_joined: Sequence[int],
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    groups: list[ParamGroup],
    beside: object = None,
) -> Any:  # noqa: ANN401 - what the lender gave
    """The same, where it is known which ranks have joined.

    Args:
        group: see `lend_gradients`.
        have_joined: ranks.
        params: see `lend_gradients`.
        pieces: see `lend_gradients`.
        groups: see `lend_gradients`.
        beside: what else the lender sends, plain values and tensors.

    Returns:
        On a rank that has joined what the lender gave for ``beside``, else None.
    """
    if not have_joined or len(have_joined) == group.size:
        return None
    lender = next(rank for rank in range(group.size) if rank not in have_joined)
    parcels, received = [], []
    with failing_together(group):
        if group.rank == lender:
            parcels = [
                (
                    to,
                    *encode(
                        {**_parcel(to, params, pieces, groups), "beside": beside}, "a gradient or option"
                    ),
                )
                for to in have_joined
            ]
    for to, skeleton, tensors in parcels:
        send_value(group, [to], skeleton, tensors)
    if group.rank in have_joined:
        received.append(recv_encoded(group, lender))
    parcel: ParamGroup = {}
    with failing_together(group):  # a gradient may be of a tensor subclass that is not imported here
        for skeleton, tensors in received:
            parcel = decode(skeleton, iter(tensors))
            _unpack(parcel, params, pieces, groups, group.rank)
    return parcel.get("beside")


def _parcel(
    to: int, params: Sequence[Tensor], pieces: Sequence[Pieces], groups: list[ParamGroup]
) -> ParamGroup:
    """Put together what one joined rank needs."""
    grads: dict[int, Tensor] = {}
    partial: list[int] = []
    for index, (param, of_param) in enumerate(zip(params, pieces, strict=True)):
        piece = piece_of(of_param, to)
        if piece is None or param.grad is None:
            continue
        if isinstance(param.grad, PartialGradient):
            partial.append(index)
        else:
            grad = owned_gradient(param, piece)
            assert grad is not None  # see above
            grads[index] = grad
    return {"grads": grads, "partial": partial, "options": [options_of(group) for group in groups]}


def _unpack(
    parcel: ParamGroup,
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    groups: list[ParamGroup],
    rank: int,
) -> None:
    """Install a parcel."""
    for group, options in zip(groups, parcel["options"], strict=True):
        group.update(options)
    partial = frozenset(parcel["partial"])  # where gradients are sharded, owners have them by themselves
    for index, (param, of_param) in enumerate(zip(params, pieces, strict=True)):
        piece = piece_of(of_param, rank)
        if piece is not None and index not in partial:
            set_owned_gradient(param, piece, parcel["grads"].get(index))
