"""What the wrappers have in common: `ReducedModule` all, `ShardedModule` those of stages 2 and 3."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.explain import summary
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import names_text
from zero_optim.step.unreduced import NOT_REDUCED, FrozenParams

Accumulate = Literal["owner", "local"]

_REDUCES_EACH = 'no_sync(), under which accumulate="owner" reduces every pass, and "local" none'


class ReducedModule:
    """A part of every wrapper, which has a reducer."""

    require_backward_grad_sync: bool

    def _own(self) -> Reducer:
        raise NotImplementedError

    def _wants(self, was_expected: bool) -> bool:
        """Whether the backward pass that begins is to be reduced."""
        return was_expected and self.require_backward_grad_sync

    def _end_forward(self, output: object) -> None:
        """Expect a backward pass, behind a forward pass with gradients."""
        if torch.is_grad_enabled():
            self._own().end_forward(output, syncs=self.require_backward_grad_sync)

    def check_finished(self) -> None:
        """Raise `ReductionError`, on every rank, if gradients were incomplete; all ranks call.

        On a CPU ``backward()`` has raised by itself. On a GPU call this after the last pass, or before you
        write a checkpoint. Waits for the device.
        """
        self._own().check_finished()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """Return what the reductions on this rank communicated since the last call. No communication.

        The keys are those of `ZeroRedundancyOptimizer.metrics`. Phases: ``reduce`` (gradients), ``agree``
        (failures, unused parameters), ``order`` (of new buckets) and ``total``. ``passes`` counts reduced
        backward passes. With a comm hook ``exposed_seconds/reduce`` is the time of the hook and of the wait
        for it; what it sends is not counted, nor are buffers. ``reset=False`` leaves the counts alone.
        """
        traffic = self._own().group.phase.traffic
        return traffic.figures(("reduce", "agree", "order"), "passes", reset=reset)


class ShardedModule(ReducedModule):
    """A part of the wrappers whose gradients go to their owners."""

    _STAGE: ClassVar[int]
    _WITHOUT_JOIN: ClassVar[str]  # the reason
    _optimizer: ZeroRedundancyOptimizer
    _mesh: RankMesh | None
    _accumulate: Accumulate
    _frozen: FrozenParams

    @property
    def _everyone(self) -> RankGroup:
        """All ranks that train the model: those of the optimizer, or of the mesh."""
        return self._optimizer.ranks if self._mesh is None else self._mesh.everyone

    def extra_repr(self) -> str:
        """Say what this rank holds; no communication."""
        return f"{summary(self._optimizer.core)}, ZeRO stage {self._STAGE}"

    def _end_forward(self, output: object) -> None:
        names = [name for name, _ in self._frozen.unfrozen()]
        if names and torch.is_grad_enabled():
            raise RuntimeError(f"{names_text(names)} {NOT_REDUCED}")
        super()._end_forward(output)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:  # noqa: ANN401 - as there
        """Call ``optimizer.clip_grad_norm_``; all ranks call."""
        return self._optimizer.clip_grad_norm_(max_norm, norm_type, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the passes in this context. With ``accumulate="owner"`` it changes nothing.

        With "local" gradients are added up on each rank, and the next pass outside reduces the sums.
        """
        if self._accumulate == "owner":  # ranks that wait for each other tell how often each was here
            with self._everyone.doing(_REDUCES_EACH):
                pass
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = before and self._accumulate == "owner"
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: object) -> NoReturn:
        """Refuse a comm hook with a RuntimeError: gradients are reduced to owners here."""
        raise RuntimeError(
            f"{type(self).__name__} reduces gradients to their owners, and takes no comm hook: use "
            "zero_optim.ddp.DistributedDataParallel with it"
        )

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse ``Join`` with a RuntimeError, which has the reason."""
        raise RuntimeError(f"{type(self).__name__} takes no part in Join: {self._WITHOUT_JOIN}")
