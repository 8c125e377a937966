"""The owners of a bucket's gradients, and the value of ``param.grad`` on this rank.

Note [Gradients set by hand]
    Whole gradients that a user puts in ``param.grad`` before a pass are not reduced. Each owner adds its rows
    of them to the result, once; other ranks drop them. If all ranks set the same, DDP gives the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.plan.pieces import Pieces, is_whole, piece_of
from zero_optim.shard.keeping import HostKeeping, RowKeeping
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwners:
    """Who owns the gradients of a bucket. Slots are places in the bucket."""

    names: tuple[str, ...]  # of the parameters
    pieces: tuple[Pieces, ...]  # of each
    rank: int
    size: int
    dtype: torch.dtype | None = None  # in which owners keep reduced gradients; None for the parameters'
    keeping: RowKeeping = field(default_factory=RowKeeping)  # of the rows of this rank
    agree: Agree | None = None  # tells all ranks what a scaler has found; see `PartialGradient`

    def _keeps_another(self, param: Tensor) -> bool:
        """Whether reduced gradients have another dtype or place, so that the parameter cannot show them."""
        return self.dtype not in (None, param.dtype) or isinstance(self.keeping, HostKeeping)

    def copies(self, sums: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
        """Copy sums of this rank's rows to where they are kept, each in a dtype."""
        return self.keeping.copies(tensor.to(dtype) for tensor, dtype in sums)

    def _partial(self, slot: int, param: Tensor, rows: Tensor | None) -> PartialGradient:
        comes = self.keeping.wait if isinstance(self.keeping, HostKeeping) else None
        pieces, name = self.pieces[slot], self.names[slot]
        return PartialGradient(param, pieces, rows, name, self.dtype, comes, self.agree)

    def shown(self, slot: int, param: Tensor, kept: Tensor | None, reduced: Tensor | None) -> Tensor:
        """Return ``param.grad``: the gradient on the owner of the whole, else a partial one.

        ``kept``, the gradient of earlier passes, gets ``reduced`` added in place. It may be whole:
        Note [Gradients set by hand].
        """
        if kept is None:
            if reduced is None or len(self.pieces[slot]) > 1 or self._keeps_another(param):
                return self._partial(slot, param, reduced)
            return owned(reduced, self.agree)
        if not isinstance(kept, PartialGradient):
            kept = self._taken_over(slot, param, kept.to_dense())
        if reduced is not None:
            target = kept.rows_to_come if isinstance(kept, PartialGradient) else kept
            assert target is not None  # this rank owns rows of it
            self.keeping.add(target, reduced)
        return kept if isinstance(kept, PartialGradient) else owned(kept, self.agree)

    def _taken_over(self, slot: int, param: Tensor, whole: Tensor) -> Tensor:
        piece = piece_of(self.pieces[slot], self.rank)
        if piece is None:
            return self._partial(slot, param, None)
        if self._keeps_another(param):
            rows = next(self.copies([(rows_of(whole, piece), self.dtype or param.dtype)]))
            return self.shown(slot, param, None, rows)
        if is_whole(piece, param.shape):
            return whole
        return self.shown(slot, param, None, rows_of(whole, piece).clone())  # a view would keep the whole

    def shown_sparse(self, param: Tensor, kept: Tensor | None, total: Tensor) -> Tensor:
        """Return what stands in ``param.grad`` of the only parameter: owners have the whole sum."""
        if piece_of(self.pieces[0], self.rank) is None:
            elsewhere = PartialGradient(param, self.pieces[0], None, self.names[0], agree=self.agree)
            elsewhere.is_of_sparse = True
            return elsewhere
        reduced = total.to(param.dtype)
        return owned(reduced if kept is None else kept + reduced, self.agree)
