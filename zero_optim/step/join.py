"""Uneven inputs: a rank without data still steps what it owns while others train.

It has no gradients, and DDP does not give it reduced ones. So an active rank lends it those of its rows, and
the options, which schedulers change. The bits are those of the active ranks with an unsharded optimizer. The
loan ends with the step: a loop with ``zero_grad()`` at its end keeps its own gradients for the next epoch.
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
    """The state of an optimizer inside ``Join``.

    ``is_announced``: ``Join`` knows that this rank is active in this iteration. ``given``: parameters with
    gradients of a shadowed backward pass.
    """

    is_announced: bool = False
    given: list[Tensor] = field(default_factory=list)

    @contextmanager
    def borrowing(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Hold borrowed gradients during the body, on a joined rank; no communication.

        Afterwards new gradients are removed. The others are zeroed in place, as they may be DDP's views: they
        were zeros before, or old ones that the loop drops before use.
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
    """Joins each step of the active ranks, one an iteration, through ``shadow``."""

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Shadow one iteration; ``Join`` calls it while some rank is active."""
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
    """Send joined ranks the gradients of the rows they own, and the options; all ranks call each step.

    One collective of a byte while all are active; otherwise the lowest active rank also sends to each joined
    one, whose gradients and options are overwritten. Raises the ``failure`` of any rank on every rank.
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
    """Do what `lend_gradients` does when the joined ranks are known; all ranks call.

    ``beside``: plain values and tensors that the lender also sends. Returned on joined ranks, else None.
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
    for group, options in zip(groups, parcel["options"], strict=True):
        group.update(options)
    partial = frozenset(parcel["partial"])  # where gradients are sharded, owners have them by themselves
    for index, (param, of_param) in enumerate(zip(params, pieces, strict=True)):
        piece = piece_of(of_param, rank)
        if piece is not None and index not in partial:
            set_owned_gradient(param, piece, parcel["grads"].get(index))
