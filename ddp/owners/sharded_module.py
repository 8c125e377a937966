"""`ShardedModule`: what the wrappers of stages 2 and 3 have in common, whose gradients go to their owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.explain import summary
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import names_text
from zero_optim.step.unreduced import NOT_REDUCED, FrozenParams

Accumulate = Literal["owner", "local"]

_REDUCES_EACH = 'no_sync(), under which accumulate="owner" reduces every pass, and "local" none'


class ShardedModule:
    """A part of `ShardedDataParallel`, which is PyTorch's wrapper too, and `FullyShardedDataParallel`."""

    _STAGE: ClassVar[int]
    _WITHOUT_JOIN: ClassVar[str]  # the reason
    require_backward_grad_sync: bool
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

    def _check_frozen(self) -> None:
        names = [name for name, _ in self._frozen.unfrozen()]
        if names:
            raise RuntimeError(f"{names_text(names)} {NOT_REDUCED}")

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
