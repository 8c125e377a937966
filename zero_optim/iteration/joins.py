"""An optimizer inside ``Join``: a rank that ran out of inputs still steps what it owns while others train.

An active rank sends a joined one, for one step, the options and the gradients of the rows it owns.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import Piece, is_whole, piece_of, rows_of, whole_piece
from zero_optim.state.core import Core
from zero_optim.state.moving import RowMap, move
from zero_optim.step.join import Status, exchange, ranks_that

_GRAD = "grad"
# As a stall names it.
STEP_OF_JOIN = "step inside Join, which each forward pass has, so that none can be under no_sync()"


class ShadowHook(JoinHook):
    """Calls ``shadow`` for each step of the active ranks, which must step once an iteration."""

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Shadow one iteration."""
        self._shadow()


def refuse_no_sync(params: Collection[Tensor]) -> None:
    """Raise RuntimeError if an optimizer with any of the parameters is inside a ``Join``."""
    for joins in list(_JOINS):
        if joins.under_way and any(param in params for param in joins._core.params):
            raise RuntimeError(
                "inside Join with a sharded optimizer a forward pass cannot be under no_sync(): ranks that "
                "ran out of inputs step once for each forward pass of the others. Leave no_sync() out, or "
                "give every rank as many batches and leave Join out"
            )


class Joins(Joinable):
    """The optimizer's side of ``Join``."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        _JOINS.add(self)
        self._core = core
        self._clips: list[str] = []  # the arguments of each since the last step

    def release(self) -> None:
        """Begin anew: PyTorch leaves the configuration as the last Join set it."""
        Joins.__init__(self, self._core)

    @property
    def under_way(self) -> bool:
        """Whether a ``Join`` is active, so that ranks may run out of inputs."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Begin an epoch. The optimizer's own hook does the work."""
        self._clips = []
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        """The device for ``Join``'s own small tensors."""
        return self._core.group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self._core.group.process_group

    def announce(self) -> bool:
        """Report to ``Join`` that this rank is active in this iteration; return whether there is one."""
        Join.notify_join_context(self)
        return bool(self._join_config.enable)

    def note_clip(self, arguments: str) -> None:
        """Note with what this rank has clipped, which the others hear of before the step."""
        self._clips.append(arguments)

    def take_clips(self) -> str:
        """Return what was noted since the last step."""
        clips, self._clips = self._clips, []
        return "; ".join(clips)

    def end_step(self) -> None:
        """Wait for lazy gathers: ``Join`` ends with DDP's broadcast, which reads all parameters."""
        self._core.engine.under_way.wait()

    def lend(
        self,
        group: RankGroup,
        statuses: Sequence[Status],
        params: Sequence[Tensor] | None = None,
    ) -> None:
        """Lend joined ranks options, and gradients of some parameters, by default all; all ranks call."""
        core, joined = self._core, ranks_that(statuses, Status.JOINED)
        if len(joined) in (0, group.size):
            return
        chosen = core.params if params is None else params
        pieces = [core.sharding.pieces[param] for param in chosen]
        lender = next(rank for rank in range(group.size) if rank not in joined)
        lent: dict[Any, Any] = {}
        if group.rank == lender:
            grads = [param.grad for param in chosen]
            lent = {index: {_GRAD: grad} for index, grad in enumerate(grads) if grad is not None}
            lent[len(chosen)] = list(map(options_of, core.groups))
        # Options are an entry of one row more, which every joined rank wants.
        shapes = [*(tuple(param.shape) for param in chosen), ()]
        held = [whole_piece(lender, shape) for shape in shapes]
        wanted = [tuple(piece for piece in of_param if piece.owner in joined) for of_param in pieces]
        wanted.append(tuple(Piece(rank, 0, 1) for rank in joined))
        shaped = {index: frozenset({_GRAD}) for index, of_param in enumerate(pieces) if len(of_param) > 1}
        lent = move(group, RowMap(shapes, shaped, held, wanted), lent, about="a gradient or option")
        if group.rank not in joined:
            return
        for own, options in zip(core.groups, lent[len(chosen)], strict=True):
            own.update(options)
        for index, (param, of_param) in enumerate(zip(chosen, pieces, strict=True)):
            piece = piece_of(of_param, group.rank)
            if piece is not None:
                _set_rows(param, piece, lent.get(index, {}).get(_GRAD))

    def exchange_and_lend(
        self, group: RankGroup, params: Sequence[Tensor], *, joined: bool, failure: Exception | None = None
    ) -> None:
        """Exchange statuses, then lend gradients; raises any rank's ``failure`` on every rank; all call."""
        status = Status.JOINED if joined else Status.NOTHING
        self.lend(group, exchange(group, status, failure=failure), params=params)

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """Use other ranks' gradients in the body, on a joined rank; no communication."""
        params = self._core.params
        before = {param for param in params if param.grad is not None}
        try:
            yield
        finally:
            with torch.no_grad():
                for param in params:
                    if param.grad is not None and param in before:
                        param.grad.zero_()  # perhaps a view of DDP's; it was zero, or the loop drops it
                    else:
                        param.grad = None


_JOINS: WeakSet[Joins] = WeakSet()


@torch.no_grad()
def _set_rows(param: Tensor, piece: Piece, rows: Tensor | None) -> None:
    """Set the rows of a gradient in place, as it may be a view of DDP's, or None; others become undefined."""
    is_new = param.grad is None or param.grad.is_sparse
    if rows is None or rows.is_sparse or (is_new and is_whole(piece, param.shape)):
        param.grad = None if rows is None else rows.to(param.device)
        return
    grad = param.grad = torch.zeros_like(param) if is_new or param.grad is None else param.grad
    rows_of(grad, piece).copy_(rows)
