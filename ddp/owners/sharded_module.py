"""What the wrappers have in common, and what some refuse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal, NoReturn

import torch

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.explain import summary
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import names_text
from zero_optim.step.unreduced import NOT_REDUCED, FrozenParams

Accumulate = Literal["owner", "local"]

_REDUCES_EACH = 'no_sync(), under which accumulate="owner" reduces every pass, and "local" none'
_SHOWN = frozenset({"device", "module", "process_group", "require_backward_grad_sync", "training"})


class ShardedModule:
    """A part of every wrapper, which has a reducer; `_stage`, of ZeRO, says what it does."""

    _stage: ClassVar[int]
    _optimizer: ZeroRedundancyOptimizer  # stages 2 and 3: gradients go to their owners
    _mesh: RankMesh | None = None
    _accumulate: Accumulate = "local"
    _frozen: FrozenParams
    require_backward_grad_sync: bool

    def __dir__(self) -> list[str]:  # without what constructors set
        return [name for name in super().__dir__() if name in _SHOWN or name not in vars(self)]

    def _own(self) -> Reducer:
        raise NotImplementedError

    @property
    def _everyone(self) -> RankGroup:
        """All ranks that train the model: those of the optimizer, or of the mesh."""
        return self._optimizer.ranks if self._mesh is None else self._mesh.everyone

    def extra_repr(self) -> str:
        """Say what this rank holds; no communication."""
        return f"{summary(self._optimizer.core)}, ZeRO stage {self._stage}"

    def _wants(self, was_expected: bool) -> bool:
        """Whether the backward pass that begins is to be reduced."""
        return was_expected and self.require_backward_grad_sync

    def _end_forward(self, output: object) -> None:
        """Expect a backward pass, behind a forward pass with gradients."""
        if not torch.is_grad_enabled():
            return
        unfrozen = [name for name, _ in self._frozen.unfrozen()] if self._stage > 1 else []
        if unfrozen:
            raise RuntimeError(f"{names_text(unfrozen)} {NOT_REDUCED}")
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of these passes on each rank; the next pass outside reduces the sums.

        With ``accumulate="owner"`` of a sharded wrapper it changes nothing.
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


def refusing(sentence: str) -> Callable[..., NoReturn]:
    """Return a method that raises RuntimeError, with a sentence about the class."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        """Refuse with a RuntimeError, which has the reason."""
        raise RuntimeError(f"{type(self).__name__} {sentence}")

    return refuse


NO_HOOK = (
    "reduces gradients to their owners, and takes no comm hook: use "
    "zero_optim.ddp.DistributedDataParallel with it"
)
